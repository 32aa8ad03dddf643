"""Write ``docs/models.md``: for models and plans, whether training equals eager PyTorch, and what the plan costs.

python benchmarks/models.py                                    all of it, with 20 steps each
python benchmarks/models.py --model gpt2 --plan "data 2" --steps 3 --output -
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor, nn

from actorflow_compiler.core.errors import ActorflowError
from actorflow_compiler.core.sbp import B, Sbp, Split
from actorflow_compiler.hints.goal import Goal, ParallelMode
from actorflow_compiler.hints.hints import distribute, zero
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.summary import summarise

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import transformers

from hf import PROMISED, exact
from models import CASES, DROPOUT, Case
from trained import Layout, differences, plan_of, train_eagerly, train_planned

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "models.md"
SIZE = 8  # samples in a batch
DROPPED = 0.1  # the share of elements that dropout drops
SEEDS = 10  # of random hints
MOST = {"tensor": 0.20, "data": 0.05}  # of all FLOPs that may be done more than once
LOSSES = 1e-5  # how far losses may differ


def random_hints(seed: int, model: nn.Module) -> None:
    """Lay every parameter out at random: split along any dim, whole, or free."""
    generator = torch.Generator().manual_seed(seed)
    hints: dict[str, Sbp] = {}
    for name, parameter in model.named_parameters():
        choices: list[Sbp | None] = [None, B, *(Split(d) for d, n in enumerate(parameter.shape) if n > 1)]
        chosen = choices[int(torch.randint(len(choices), (), generator=generator))]
        if chosen is not None:
            hints[name.replace(".", r"\.")] = chosen
    distribute(model, hints)


Trained = tuple[Sequence[float], dict[str, Tensor]]  # losses of the steps, and parameters after them

PLANS: dict[str, Layout] = {
    "data 2": Layout(2),
    "tensor 2": Layout(2, goal=Goal((ParallelMode.TENSOR,))),
    "data 2 × tensor 2": Layout(4, goal=Goal((ParallelMode.DATA, ParallelMode.TENSOR), mesh=(2, 2))),
    **{f"ZeRO {stage}": Layout(2, prepare=partial(zero, stage=stage)) for stage in (1, 2, 3)},
    **{f"hints {seed}": Layout(2, prepare=partial(random_hints, seed)) for seed in range(SEEDS)},
}
MODELS: dict[str, Callable[[float], Case]] = {
    "mlp": lambda p: DROPOUT if p else CASES["mlp"],
    "cnn": lambda p: CASES["cnn"],
    **PROMISED,
}
WITHOUT_DROPOUT = frozenset({"cnn"})


@dataclass(frozen=True, slots=True)
class Row:
    """A model under a plan."""

    model: str
    plan: str
    dropout: bool
    losses: float  # the largest difference in relation to the loss
    parameters: float  # see ``differences``
    bound: float  # of ``parameters``
    redundant: float  # share of all FLOPs
    memory: tuple[tuple[int, int, int], ...]  # bytes of parameters, optimizer state and activations of each rank
    moved: int  # bytes in an iteration
    stages: tuple[str, ...]
    named: str  # the ops behind redundant FLOPs
    error: str = ""

    @property
    def verdict(self) -> str:
        """Whether the row counts, or why it does not."""
        if self.error:
            return self.error
        if not (self.losses <= LOSSES and self.parameters <= self.bound):
            return "**differs**"
        most = MOST["tensor" if "tensor" in self.plan else "data"]
        return "yes" if self.redundant <= most else f"equal, but {self.named}"

    def line(self) -> str:
        """The row of the table."""
        memory = " / ".join(
            ", ".join(_size(n) for n in sorted(set(column))) for column in zip(*self.memory, strict=True)
        )
        cells = [
            self.model + (", dropout" if self.dropout else ""), self.plan, f"{self.losses:.0e}",
            f"{self.parameters:.0e}", f"{self.redundant:.1%}", memory, _size(self.moved),
            " → ".join(f"`{stage}`" for stage in self.stages), self.verdict,
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"


HEAD = """\
| model | plan | losses | parameters | redundant | parameters / optimizer / activations | moved | stages | counts |
|---|---|---|---|---|---|---|---|---|"""


def measure(model: str, plan: str, dropout: bool, steps: int, expected: Trained) -> Row:
    """Train a model under a plan, and compare."""
    case = MODELS[model](DROPPED if dropout else 0.0)
    precise, bound = exact(model, case)
    losses, state, _ = train_planned(precise, PLANS[plan], [SIZE] * steps)
    wanted_losses, wanted = expected
    figures = figures_of(plan_of(case, PLANS[plan], SIZE)[0])
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted_losses, strict=True))
    return replace(
        figures, model=model, plan=plan, dropout=dropout, losses=off,
        parameters=max(differences(state, wanted).values()), bound=bound,
    )  # fmt: skip


def figures_of(plan: Plan) -> Row:
    """What the plan says of itself."""
    plan = summarise(plan)
    found = plan.summary
    memory = tuple((m.parameters, m.optimizer, m.activations) for m in found.memory)
    named = "; ".join(note for note in plan.notes if "more than once" in note)
    moved = sum(n for _, n in found.moved)
    return Row("", "", False, 0.0, 0.0, 0.0, found.redundant_flops, memory, moved, found.stages, named)


def reference(model: str, dropout: bool, steps: int) -> Trained:
    """Losses and parameters of eager PyTorch on one device; with dropout, of the one-device job."""
    case, _ = exact(model, MODELS[model](DROPPED if dropout else 0.0))
    if dropout:
        return train_planned(case, Layout(1), [SIZE] * steps)[:2]
    return train_eagerly(case, [SIZE] * steps, 1)


def rows(models: Sequence[str], plans: Sequence[str], steps: int) -> Iterator[Row]:
    """All rows, the random hints of a model as one."""
    for model in models:
        for dropout in (False,) if model in WITHOUT_DROPOUT else (False, True):
            expected = reference(model, dropout, steps)
            drawn: list[Row] = []
            for plan in plans:
                begin = time.perf_counter()
                try:
                    row = measure(model, plan, dropout, steps, expected)
                except (ActorflowError, RuntimeError, TimeoutError, AssertionError) as error:
                    row = Row(model, plan, dropout, 0, 0, 0, 0, ((0, 0, 0),), 0, (), "", _brief(error))
                print(f"{time.perf_counter() - begin:6.1f} s  {row.line()}", file=sys.stderr, flush=True)
                if plan.startswith("hints "):
                    drawn.append(row)
                else:
                    yield row
            if drawn:
                yield together(drawn)


def together(found: Sequence[Row]) -> Row:
    """One row for several random plans: the worst of each figure."""
    bad = next((r for r in found if r.verdict != "yes"), None)
    memory = tuple(
        (max(m[0] for m in r.memory), max(m[1] for m in r.memory), max(m[2] for m in r.memory)) for r in found
    )
    worst = max(found, key=lambda r: r.redundant)
    return replace(
        worst, plan=f"random hints × {len(found)}", losses=max(r.losses for r in found),
        parameters=max(r.parameters for r in found), memory=memory, moved=max(r.moved for r in found),
        error="" if bad is None else f"{bad.plan}: {bad.verdict}",
    )  # fmt: skip


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".replace("|", "¦")


def _size(n: int) -> str:
    return f"{n / 1000:.1f} kB" if n < 1e6 else f"{n / 1e6:.2f} MB"


TEXT = """\
# Models under plans

Made by `python benchmarks/models.py`: {steps} steps of AdamW (the CNN: SGD with momentum) on batches of {size},
torch {torch}, transformers {transformers}, Python {python}.  Models of `transformers` are tiny and otherwise as the
library makes them; `tests/hf.py` has them.

- **losses**: the largest difference from eager PyTorch on one device, in relation to the loss; with dropout, from
  the one-device job.
- **parameters**: the largest difference after the last step, in relation to the largest element of a tensor.
- Both are of training in float64, where torch can (not the grouped product of experts): some gradients are 0, and
  AdamW makes full steps of what float32 leaves of them.  All else is of the plan in float32.
- **redundant**: the share of all FLOPs that are done on more than one device.
- **parameters / optimizer / activations**: bytes on each rank; several numbers where ranks differ.  Activations are
  all slots of all registers.
- **moved**: bytes that all ranks together send in an iteration.
- **counts**: training is equal, and redundant FLOPs are at most {data:.0%} (tensor parallelism: {tensor:.0%}); else
  the ops that force more.  Of random hints each figure is the worst.

"""


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), help="Only these models.")
@click.option("--plan", "plans", multiple=True, type=click.Choice(list(PLANS)), help="Only these plans.")
@click.option("--steps", default=20, show_default=True, help="Steps of training.")
@click.option("--output", default=str(OUTPUT), show_default=True, help="A file; - prints.")
def main(models: tuple[str, ...], plans: tuple[str, ...], steps: int, output: str) -> None:
    """Train models under plans, compare them with eager PyTorch, and write the table."""
    transformers.logging.set_verbosity_error()  # it warns of tiny configurations
    lines = [row.line() for row in rows(models or tuple(MODELS), plans or tuple(PLANS), steps)]
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    text = TEXT.format(steps=steps, size=SIZE, **versions, **MOST)
    text += "\n".join([HEAD, *lines]) + "\n"
    if output == "-":
        print(text)
    else:
        Path(output).write_text(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
