"""Plans in which attention goes around a ring: what moves, what is held, and that they train as one device does."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.custom_ops.ring_attention import RING, RING_BACKWARD
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.variant import Variant
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.timeline import simulate
from comms import communications
from models import CASES, Batch, Case
from trained import Layout, differences, in_float64, plan_of, train_eagerly, train_planned, trained_as_eagerly

LENGTH, WIDTH, HEADS, GROUPS, WORDS = 12, 16, 4, 2, 50


class Attentive(nn.Module):
    """Tokens int64[n, length] to a word for each of them, by attention of several heads to fewer heads of keys."""

    def __init__(self, causal: bool, groups: int = HEADS, padded: bool = False) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(512, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * groups * WIDTH // HEADS)
        self.out, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.causal, self.groups, self.padded = causal, groups, padded

    def forward(self, tokens: Tensor) -> Tensor:
        n, length = tokens.shape
        x = self.embed(tokens) + self.positions(torch.arange(length))
        seen = self.norm(x)
        q = self.q(seen).view(n, length, HEADS, -1).transpose(1, 2)
        k, v = self.kv(seen).view(n, length, 2, self.groups, -1).permute(2, 0, 3, 1, 4)
        shared, mask = self.groups < HEADS, (tokens % 3 != 0)[:, None, None] if self.padded else None
        found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=shared)
        logits: Tensor = self.head(x + self.out(found.transpose(1, 2).flatten(2)))
        return logits


def _tokens(sizes: Sequence[int], length: int = LENGTH) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(0, WORDS, (n, length), generator=generator) for _ in range(2)) for n in sizes]


def case(causal: bool = True, groups: int = HEADS, length: int = LENGTH, padded: bool = False) -> Case:
    def adamw(model: nn.Module) -> AdamW:
        return AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    return Case(lambda: Attentive(causal, groups, padded), adamw, functools.partial(_tokens, length=length), ("", ""))


def over(sizes: object, budget: str | None = None, **given: object) -> Layout:
    """The layout of a goal: {"ring": 4} is a run of four."""
    world = 1
    for n in sizes.values() if isinstance(sizes, dict) else (2,):
        world *= n
    return Layout(world, goal=goal_of(sizes, budget), **given)  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], Case]] = {
    "causal": case,
    "not causal": lambda: case(causal=False),
    "uneven": lambda: case(length=11),
    "uneven, not causal": lambda: case(causal=False, length=11),
    "heads share keys": lambda: case(groups=GROUPS),
    "padded": lambda: case(causal=False, padded=True, length=11),
    "gpt": lambda: CASES["gpt"],
}
LAYOUTS: dict[str, Callable[[], tuple[Layout, int]]] = {  # with the number of samples
    "2": lambda: (over({"ring": 2}), 4),
    "3, one sample": lambda: (over({"ring": 3}), 1),
    "4": lambda: (over({"ring": 4}), 2),
    "data 2 × 2": lambda: (over({"data": 2, "ring": 2}), 4),
    "data 2 × 2, uneven": lambda: (over({"data": 2, "ring": 2}), 3),
    "2 × data 2": lambda: (over({"ring": 2, "data": 2}), 4),
    "2 × tensor 2": lambda: (over({"ring": 2, "tensor": 2}), 4),
    "tensor 2 × 2": lambda: (over({"tensor": 2, "ring": 2}), 4),
    "2, micro-batches": lambda: (over("ring", micro_batches=2), 4),
    "2, ZeRO 3": lambda: (over("ring", prepare=functools.partial(zero, stage=3)), 4),
    "2 × sequence 2": lambda: (over({"ring": 2, "sequence": 2}), 2),
}


def check(model: Case, layout: str, loss: float = 1e-5, bound: float = 1e-9) -> Plan:
    return trained_as_eagerly(model, *LAYOUTS[layout](), loss, bound)


# ---- equal to eager training


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_ring_trains_as_one_device(name: str, layout: str) -> None:
    plan = check(in_float64(MODELS[name]()), layout)
    assert plan.summary.redundant_flops < 0.05


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["2", "3, one sample", "data 2 × 2", "2 × tensor 2"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "whisper"])
def test_models_of_transformers_train_around_a_ring(name: str, layout: str) -> None:
    from hf import FURTHER, PROMISED, exact  # which imports transformers

    model, bound = exact(name, {**PROMISED, **FURTHER}[name](0.0))
    assert goes_around(check(model, layout, bound=1e-4 if "tensor" in layout else bound))


VARIANTS = {
    "plain": Variant(),
    "recomputed": Variant(recompute=True),
    "gradients of parameters apart": Variant(weights=True),
    "both": Variant(recompute=True, weights=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_stage_passes_its_own_blocks_on(variant: str) -> None:
    model, layout = in_float64(CASES["gpt"]), over("ring", micro_batches=2)
    layout = replace(layout, world=4, pipeline=True, variant=VARIANTS[variant])
    losses, state, _ = train_planned(model, layout, [4] * 2)
    expected, reference = train_eagerly(model, [4] * 2, 1)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert max(differences(state, reference).values()) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2", "4", "data 2 × 2", "2 × tensor 2"])
@pytest.mark.parametrize("causal", [True, False])
def test_under_autocast_a_ring_is_as_near_to_float32_as_one_device(causal: bool, layout: str) -> None:
    plain = case(causal, length=64)

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def sgd(model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    half, (laid, size) = replace(plain, loss=loss, optimizer=sgd), LAYOUTS[layout]()
    losses, state, plan = train_planned(half, laid, [size] * 2)
    expected, one = train_eagerly(half, [size] * 2, 1)
    _, exact = train_eagerly(replace(plain, optimizer=sgd), [size] * 2, 1)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=3e-3, atol=0)
    assert any(t.dtype == "bfloat16" for r in plan.registers for t in r.tensors)
    off, usual = (max(differences(found, exact).values()) for found in (state, one))
    assert off <= 1.5 * usual + 1e-5


# ---- what is moved, and what is held


def moved(plan: Plan) -> dict[tuple[str, str], int]:
    """(Kind, phase) → bytes, without what is reduced to everybody: losses and gradients of parameters."""
    found: Counter[tuple[str, str]] = Counter()
    for c in communications(plan):
        found[c.kind, c.phase] += c.nbytes if c.kind != "all_reduce" else 0
    return {key: nbytes for key, nbytes in found.items() if nbytes}


def test_blocks_are_passed_on_and_no_device_has_more_than_two_of_others() -> None:
    devices, length, size = 4, 256, 2
    model = case(length=length)
    around = plan_of(model, over({"ring": devices}), size)[0]
    each = 2 * size * length * WIDTH * 4  # keys and values
    assert moved(around) == {
        ("all_to_all", "forward"): (devices - 1) * each,
        ("all_to_all", "backward"): (2 * devices - 1) * each,  # and their gradients, once more
    }
    for fast in (1e15, 1e8):  # bytes/s: blocks would be there long before they are needed, or arrive late
        hardware = Hardware(flops_per_s=1e9, bytes_per_s=fast, latency_s=0.0, fire_overhead_s=1e-7)
        assert most_passed(around, hardware, "F") <= 2 * each / devices
        assert most_passed(around, hardware, "B") <= 3 * each / devices  # and one of gradients


def most_passed(plan: Plan, hardware: Hardware, phase: str) -> int:
    """The most bytes passed on to it that a rank holds at a time, in the forward ("F") or the backward ("B") pass."""
    line = simulate(plan, 2, hardware)
    most = 0
    for rank in range(plan.world):
        changes: list[tuple[int, int]] = []
        for r in plan.registers:
            maker = plan.actor(r.producer)
            if maker.rank == rank and maker.name.startswith(f"all_to_all0{phase}"):
                ends = zip(*(line.ends[read.actor] for read in r.readers), strict=True)
                for begin, end in zip(line.fired[r.producer], map(max, ends), strict=True):
                    changes += [(begin, r.nbytes), (end, -r.nbytes)]
        most = max([most, *itertools.accumulate(change for _, change in sorted(changes))])
    return most


def test_a_ring_holds_less_than_a_gather() -> None:
    gathered, around = (plan_of(case(length=480), over({mode: 4}), 1)[0] for mode in ("sequence", "ring"))
    assert ("all_gather", "forward") in moved(gathered)
    assert not {kind for kind, _ in moved(around)} - {"all_to_all"}
    peak = [max(r.registers for r in forecast(plan, CPU_CORE).ranks) for plan in (gathered, around)]
    assert peak[1] < 0.8 * peak[0]


# ---- when it is chosen


def goes_around(plan: Plan) -> bool:
    """Whether attention of a plan goes around a ring, where memory lacks in the backward pass only."""
    return any(step.op in (RING, RING_BACKWARD) for body in plan.bodies for step in body.steps)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "ring"), [("10MB", False), ("210KB", True)])
def test_a_memory_budget_takes_the_ring_where_gathered_keys_do_not_fit(budget: str, ring: bool) -> None:
    plan = plan_of(case(groups=1, length=480), over({"sequence": 4}, budget), 1)[0]  # one head of keys
    assert goes_around(plan) == ring


@pytest.mark.slow
@pytest.mark.parametrize(("flops", "ring"), [(1e12, False), (1e9, True)])
def test_a_ring_is_taken_where_blocks_arrive_while_devices_compute(flops: float, ring: bool) -> None:
    slow = Hardware(flops_per_s=flops, bytes_per_s=1e8, latency_s=1e-6, fire_overhead_s=1e-7)
    plan = plan_of(case(length=480), over({"sequence": 8}, hardware=slow), 1)[0]
    assert goes_around(plan) == ring


# ---- where attention cannot go around


def test_attention_written_out_in_products_gathers_keys_as_ever_and_says_so() -> None:
    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        q = model.get_submodule("embed")(inputs)
        found = (q @ q.mT).softmax(-1) @ q
        return F.cross_entropy(model.get_submodule("head")(found).flatten(0, 1), targets.flatten())

    plan = plan_of(replace(case(), loss=loss), over({"ring": 2}), 4)[0]
    assert [note for note in plan.notes if "does not go around the ring, as it is written out in products" in note]
    assert ("all_gather", "forward") in moved(plan)
    assert not goes_around(plan)
