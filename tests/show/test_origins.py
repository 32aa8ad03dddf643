"""Where a plan comes from: its modules, the user's lines and the tensors between them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import shown_plans
from actorflow.show.modules import first_shown, fold_levels


def test_every_op_of_a_module_knows_its_line_and_so_does_its_backward_op() -> None:
    text = Path(shown_plans.__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(text, 1) if "# THE LINE" in line)
    origins = shown_plans.view().plan.origins
    for module in (f"blocks.{i}" for i in range(4)):
        for phase in ("forward", "backward"):
            found = [p for p in origins.parts if p.module in (module, f"{module}.layer") and p.phase == phase]
            lines = {origins.places[place].line for p in found for place in p.places}
            assert {line.rpartition(":")[2] for line in lines if line} == {str(number)}
            assert all(line.endswith(f"shown_plans.py:{number}") for line in lines if line)


def test_every_step_of_a_computing_actor_has_a_place() -> None:
    plan = shown_plans.view().plan
    steps = {s.actor: s.places for s in plan.origins.steps}
    for actor in plan.actors:
        if actor.kind in ("forward", "backward", "weight", "optimizer"):
            assert actor.body is not None
            assert len(steps[actor.id]) == len(plan.bodies[actor.body].steps)
            assert sum(p >= 0 for p in steps[actor.id]) > len(steps[actor.id]) / 2
    optimizer = next(a for a in plan.actors if a.kind == "optimizer")
    lines = {plan.origins.places[p].line for p in steps[optimizer.id] if p >= 0}
    text = Path(shown_plans.__file__).read_text().splitlines()
    assert {text[int(line.rpartition(":")[2]) - 1].strip() for line in lines if line} <= {"optimizer.step()"}


def test_boxing_between_modules_moves_what_the_plan_says_but_for_the_result() -> None:
    plan = shown_plans.view().plan
    moved: Counter[str] = Counter()
    for flow in plan.origins.flows:
        assert bool(flow.boxing) or not flow.moved
        moved.update({flow.boxing[0]: flow.moved} if flow.boxing else {})
    for kind, nbytes in plan.summary.moved:
        assert 0 <= nbytes - moved[kind] <= 64  # the loss goes to every rank


def test_folds_go_from_few_rows_to_every_module() -> None:
    found = fold_levels(shown_plans.view().plan.origins)
    rows = [len(f.rows) for f in found]
    assert rows == sorted(set(rows))
    names = [name for name, _ in first_shown(found).rows]
    assert [n for n in names if n.startswith("blocks")] == [f"blocks.{i}" for i in range(4)]  # a number is no level
    assert any(name == "blocks.0.layer" for name, _ in found[-1].rows)
    for fold in found:
        assert sorted(p for box in fold.boxes for p in box.parts) == list(
            range(len(shown_plans.view().plan.origins.parts))
        )
        assert all(a != b for a, b in fold.flows)
