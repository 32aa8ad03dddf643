"""Recipes are trained by jobs as by eager PyTorch, or refused as they say; ``docs/recipes.md`` is what they say."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import recipes.all  # noqa: F401
import warm
from recipes.document import OUTPUT, document
from recipes.layouts import LAYOUTS
from recipes.recipe import RECIPES
from recipes.run import Outcome, Task, outcomes

SEVERAL = [name for name, layout in LAYOUTS.items() if layout.devices > 1]
# each recipe on one device or on several, in turn, and under another layout than its neighbours
FAST = [Task(name, list(LAYOUTS)[number % len(LAYOUTS)]) for number, name in enumerate(RECIPES)]
ALL = [Task(name, layout) for name in RECIPES for layout in LAYOUTS]
SHARE = 200  # tasks, from which on two runs at a time are worth it that the second has to start


def trained(tasks: list[Task]) -> dict[Task, Outcome]:
    """What comes of tasks; of many, two shares are under way at a time."""
    shares = 2 if len(tasks) > SHARE else 1
    with ThreadPoolExecutor(shares) as pool:
        parts = pool.map(partial(outcomes, python=warm.python()), (tasks[i::shares] for i in range(shares)))
        return {task: outcome for part in parts for task, outcome in part.items()}


@pytest.fixture(scope="module")
def outcome_of(request: pytest.FixtureRequest) -> dict[Task, Outcome]:
    """What comes of the tasks of all tests that are run."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return trained(list(dict.fromkeys(t.callspec.params["task"] for t in tests if hasattr(t, "callspec"))))


def check(task: Task, outcome: Outcome) -> None:
    """Raise AssertionError where a task did not end as its recipe says."""
    recipe = RECIPES[task.recipe]
    refused = recipe.refusal(task.layout)
    if task.layout in recipe.known:
        assert outcome.ended != "equal", f"it is right: take its entry for {task.layout!r} out of `known`"
    elif refused is not None:
        assert outcome.ended == "raised", outcome
        assert re.search(refused.said, outcome.said), outcome.said
    else:
        assert outcome.ended == "equal", outcome.said


@pytest.mark.slow
@pytest.mark.timeout(7200)  # of the first one, which trains them all: so it comes before those with a shorter limit
@pytest.mark.parametrize("task", ALL, ids=lambda t: f"{t.recipe} @ {t.layout}")
def test_it_is_so_under_every_layout(task: Task, outcome_of: dict[Task, Outcome]) -> None:
    check(task, outcome_of[task])


@pytest.mark.matrix(every=40)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", FAST, ids=lambda t: f"{t.recipe} @ {t.layout}")
def test_a_recipe_is_trained_as_eagerly(task: Task, outcome_of: dict[Task, Outcome]) -> None:
    check(task, outcome_of[task])


def test_there_are_a_hundred() -> None:
    assert sum(len(r.layouts) == len(LAYOUTS) for r in RECIPES.values()) >= 100


def test_the_page_is_made_of_the_recipes() -> None:
    assert OUTPUT.read_text() == document(), "run python tests/recipes/document.py"
