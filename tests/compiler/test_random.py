"""Random ops of a job: distributed as PyTorch's, and the same numbers under every plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import ks_2samp
from torch import Tensor, distributions, nn
from torch.utils.checkpoint import checkpoint

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.custom_ops.random import HAS, UNIFORM, WHOLE, uniform
from drawn import LAYOUTS, drawn, parts_of
from models import NOISY
from trained import LAYOUTS as TRAINED
from trained import MESH, Layout, plan_of, train_planned

ROWS, COLUMNS = 604, 50
STEPS = 3
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda _: torch.rand(ROWS, COLUMNS),
    "rand of float64": lambda _: torch.rand(ROWS, COLUMNS, dtype=torch.float64),
    "rand of bfloat16": lambda _: torch.rand(ROWS, COLUMNS, dtype=torch.bfloat16),
    "rand of complex64": lambda _: torch.view_as_real(torch.rand(ROWS, COLUMNS, dtype=torch.complex64)),
    "rand into a tensor": lambda _: torch.rand(ROWS, COLUMNS, out=torch.empty(ROWS, COLUMNS)),
    "rand_like": torch.rand_like,
    "uniform_": lambda x: x.clone().uniform_(-2, 5),
    "randn": lambda _: torch.randn(ROWS, COLUMNS),
    "randn of complex64": lambda _: torch.view_as_real(torch.randn(ROWS, COLUMNS, dtype=torch.complex64)),
    "randn_like of float64": lambda x: torch.randn_like(x.double()),
    "normal_": lambda x: torch.empty_like(x).normal_(2, 3),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "normal of a shape": lambda _: torch.normal(1.0, 2.0, (ROWS, COLUMNS)),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.1, 0.3),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(1.0, 2.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "randint": lambda _: torch.randint(-3, 17, (ROWS, COLUMNS)),
    "randint of int8": lambda _: torch.randint(0, 8, (ROWS, COLUMNS), dtype=torch.int8),
    "randint of a large range": lambda _: torch.randint(0, 2**62 + 5, (ROWS, COLUMNS)),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "random_": lambda x: torch.empty_like(x).random_(),
    "random_ of uint8": lambda _: torch.empty(ROWS, COLUMNS, dtype=torch.uint8).random_(),
    "random_ of all int64": lambda _: torch.empty(ROWS, COLUMNS, dtype=torch.int64).random_(-(2**63), None),
    "randperm": lambda _: torch.randperm(ROWS),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.exp(), 7),
    "multinomial of one": lambda x: torch.multinomial(x.exp(), 1),
    "multinomial with replacement": lambda x: torch.multinomial(x.exp(), 60, True),
    "poisson": lambda x: torch.poisson(x.exp() * 5),
    "binomial": lambda x: torch.binomial((x.abs() * 5).floor(), x.sigmoid()),
    "gamma": lambda x: torch._standard_gamma(x.exp()),
    "dirichlet": lambda x: torch._sample_dirichlet(x.exp()),
    "dropout": lambda x: F.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "gumbel_softmax of one": lambda x: F.gumbel_softmax(x, hard=True).argmax(-1),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(torch.empty_like(x), 0.5, 2.0, -1.0, 2.0),
    "xavier_uniform_": lambda x: nn.init.xavier_uniform_(torch.empty_like(x)),
    "Normal": lambda x: distributions.Normal(x, x.exp()).rsample(),
    "Categorical": lambda x: distributions.Categorical(logits=x).sample(),
    "Beta": lambda x: distributions.Beta(x.exp(), x.abs() + 1).rsample(),
    "StudentT": lambda x: distributions.StudentT(x.exp() + 1).rsample(),
    "MultivariateNormal": lambda _: distributions.MultivariateNormal(torch.ones(3), 2 * torch.eye(3)).rsample((ROWS,)),
}


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def all_ops(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(function(x) for function in OPS.values())


@pytest.fixture(scope="module")
def results(inputs: Tensor) -> dict[str, Tensor]:
    """What each op draws in a job on one device."""
    return dict(zip(OPS, drawn(all_ops, inputs), strict=True))


@pytest.fixture(scope="module")
def expected(inputs: Tensor) -> dict[str, Tensor]:
    """What PyTorch draws."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dict(zip(OPS, all_ops(inputs), strict=True))


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("name", OPS)
def test_numbers_are_distributed_as_those_of_pytorch(
    name: str, results: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    found, wanted = results[name], expected[name]
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    a, b = found.double().flatten(), wanted.double().flatten()
    assert ks_2samp(a, b).statistic <= 2.2 * (2 / len(a)) ** 0.5  # beyond by chance once in 8000 times


@pytest.mark.parametrize(
    "layout", [layout if layout == "both" else pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS]
)
def test_every_op_draws_the_same_under_every_plan(layout: str, inputs: Tensor, results: dict[str, Tensor]) -> None:
    world, micro_batches = LAYOUTS[layout]
    found = drawn(all_ops, inputs, world=world, micro_batches=micro_batches)
    for name, value in zip(OPS, found, strict=True):
        wanted = results[name]
        if wanted.is_floating_point():
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=name)
        else:
            assert torch.equal(value, wanted), name


def test_samples_without_replacement_are_distinct_and_a_permutation_has_every_number(
    results: dict[str, Tensor],
) -> None:
    rows = results["multinomial"].sort(-1).values
    assert (rows[:, 1:] > rows[:, :-1]).all()
    assert torch.equal(results["randperm"].sort().values, torch.arange(ROWS))


def test_what_has_no_weight_is_not_drawn() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0]).repeat(2000, 1)
    for replacement in (False, True):
        (found,) = drawn(lambda w, r=replacement: torch.multinomial(w, 2, r), weights)
        assert set(found.flatten().tolist()) == {1, 3}
    assert drawn(torch.bernoulli, torch.zeros(999))[0].sum() == 0
    assert drawn(torch.bernoulli, torch.ones(999))[0].sum() == 999


def test_numbers_stay_below_the_end_of_their_range_in_narrow_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        numbers, scaled = drawn(
            lambda t=dtype: (torch.rand(200_000, dtype=t), torch.empty(200_000, dtype=t).uniform_(3, 4))
        )
        assert numbers.max() < 1
        assert 3 <= scaled.min() < scaled.max() < 4
        assert numbers.dtype == scaled.dtype == dtype


def test_waiting_times_are_never_zero() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        (times,) = drawn(lambda t=dtype: torch.empty(1 << 20, dtype=t).exponential_(100.0))
        assert times.min() > 0
        assert times.log().isfinite().all()


# the hash


def plain(*shape: int, stream: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return uniform(shape, tuple(((0, n),) for n in shape), stream, seed, None, None, dtype, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_uniform(dtype: torch.dtype) -> None:
    numbers = plain(300, 400, dtype=dtype)
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    assert parts_of(numbers).abs().max() < 4
    assert parts_of(numbers * 1024 % 1).abs().max() < 4  # the low digits, too


def test_every_bit_is_one_half_of_the_time() -> None:
    bits = plain(1 << 16, dtype=torch.int64)
    share = torch.stack([(bits >> k & 1).double().mean() for k in range(64)])
    assert (share - 0.5).abs().max() < 4 * 0.5 / 2**8
    assert len(bits.unique()) == len(bits)


def test_streams_seeds_and_neighbours_are_independent() -> None:
    n = 1 << 16
    first = plain(n, stream=1, seed=0)
    others = [plain(n, stream=s, seed=k) for s, k in ((2, 0), (0, 0), (1, 1), (2, 1), (1, 2**53 - 1), (2**62, 0))]
    others += [a.roll(shift) for a in (first, *others[:3]) for shift in (1, -1, 50) if a is not None]
    for other in others:
        assert not torch.equal(first[100:200], other[100:200])
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 4 / n**0.5
    pairs = torch.histogramdd(torch.stack([first, others[0]], 1).double(), [16, 16], [0.0, 1, 0, 1]).hist  # type: ignore[arg-type]
    assert ((pairs - n / 256) / (n / 256) ** 0.5).abs().max() < 4.5


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 40_000), (70_000,), (2, 70_000), (), (0, 3), (3, 0)])
def test_the_parts_of_a_tensor_have_the_numbers_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = plain(*shape)
    assert whole.shape == shape
    for dim, size in enumerate(shape):
        cut = [tuple(((0, n),) for n in shape) for _ in range(2)]
        middle = size // 3
        at = [(0, middle), (middle, size - middle)]
        parts = [
            uniform(shape, (*has[:dim], (r,), *has[dim + 1 :]), 1, 0, None, None, torch.float32, None)
            for has, r in zip(cut, at, strict=True)
        ]
        assert torch.equal(torch.cat(parts, dim), whole)


# which draws are equal


def test_calls_and_ops_draw_anew() -> None:
    first, second, again, more = drawn(lambda: (torch.rand(99), torch.rand(99)), calls=(0, 1))
    numbers = torch.cat([first, second, again, more])
    assert len(numbers.unique()) == 4 * 99


def test_state_of_the_generator_that_a_job_restores_gives_the_same_numbers_again() -> None:
    def step() -> tuple[Tensor, ...]:
        before = torch.get_rng_state()
        first = torch.randn(9)
        torch.set_rng_state(before)
        with torch.random.fork_rng():
            again = torch.randn(9)
        return first, again, torch.randn(9), torch.randn(9)

    first, again, third, other = drawn(step)
    assert torch.equal(first, again)
    assert torch.equal(first, third)
    assert not torch.equal(first, other)


def test_a_job_that_seeds_draws_the_same_in_every_call() -> None:
    def step() -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            fixed = torch.randn(9)
        return fixed, torch.randn(9)

    fixed, free, same, other = drawn(step, calls=(0, 1))
    assert torch.equal(fixed, same)
    assert not torch.equal(free, other)
    assert not torch.equal(fixed, free)


def test_a_draw_from_a_generator_of_the_scripts_is_refused_with_its_line() -> None:
    own = torch.Generator().manual_seed(1)
    before = own.get_state()
    draws: list[Callable[[], Tensor]] = [
        lambda: torch.rand(9, generator=own),
        lambda: torch.randperm(9, generator=own),
        lambda: torch.nn.init.normal_(torch.empty(9), generator=own),
        lambda: torch.randn(9, generator=torch.Generator().manual_seed(1)),
    ]
    for draw in draws:
        with pytest.raises(CaptureError, match=r"test_random\.py:\d+: (.|\n)*from a generator of its own"):
            drawn(draw)
    assert torch.equal(own.get_state(), before)
    first, second = drawn(lambda: (torch.rand(9, generator=torch.default_generator), torch.rand(9)))
    assert len(torch.cat([first, second]).unique()) == 2 * 9


def test_a_capture_leaves_the_generator_of_the_script_alone() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        before = torch.get_rng_state()
        drawn(lambda: torch.rand(9))
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.initial_seed() == 5


def noisy_block(x: Tensor, w: Tensor) -> Tensor:
    x = F.dropout(torch.tanh(x @ w), 0.4)
    return x + 0.1 * torch.randn_like(x)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_again_with_the_same_numbers(reentrant: bool, layout: tuple[int, int]) -> None:
    start = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def gradient(x: Tensor, block: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        w = nn.Parameter(start.clone())
        y = block(block(x.clone().requires_grad_(), w), w)
        y.square().sum().backward()
        assert w.grad is not None
        return y.detach(), w.grad

    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    expected = drawn(lambda x: gradient(x, noisy_block), x)
    world, micro_batches = layout
    found = drawn(
        lambda x: gradient(x, lambda x, w: checkpoint(noisy_block, x, w, use_reentrant=reentrant)),
        x,
        world=world,
        micro_batches=micro_batches,
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_attention_drops_its_share_of_the_weights_without_bias() -> None:
    q, v = torch.zeros(64, 4, 16, 8), torch.ones(64, 4, 16, 8)
    (found,) = drawn(lambda q, v: F.scaled_dot_product_attention(q, q, v, dropout_p=0.25), q, v)
    kept = found[..., 0] * 16 * 0.75  # of 16 weights
    assert torch.equal(kept.round(), kept.round().clamp(0, 16))
    assert abs(kept.mean() - 12) < 4 * (16 * 0.25 * 0.75) ** 0.5 / kept.numel() ** 0.5
    assert 3.5 < kept.var() / 0.8 < 4  # 16 · 0.25 · 0.75 = 3


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("layout", [(2, 1), (1, 4)])
def test_recurrent_layers_drop_alike_under_every_plan(kind: type[nn.RNNBase], layout: tuple[int, int]) -> None:
    torch.manual_seed(0)
    net = kind(6, 5, 2, dropout=0.5, batch_first=True)
    x = torch.randn(8, 3, 6)
    once, other = drawn(lambda x: net(x)[0], x, calls=(0, 1))
    assert not torch.equal(once, other)
    (found,) = drawn(lambda x: net(x)[0], x, world=layout[0], micro_batches=layout[1])
    torch.testing.assert_close(found, once, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def trained_on_one() -> tuple[list[float], dict[str, Tensor]]:
    losses, state, _ = train_planned(NOISY, TRAINED["one device"], [16] * STEPS)
    return losses, state


LAYOUTS_OF_NOISY = {name: TRAINED[name] for name in ("four micro-batches", "output layer split", "data 2, pipeline 2")}
LAYOUTS_OF_NOISY["mesh"] = MESH


@pytest.mark.matrix(every=6)
@pytest.mark.parametrize("layout", LAYOUTS_OF_NOISY)
def test_a_model_full_of_noise_trains_alike_under_every_plan(
    layout: str, trained_on_one: tuple[list[float], dict[str, Tensor]]
) -> None:
    losses, state, _ = train_planned(NOISY, LAYOUTS_OF_NOISY[layout], [16] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(trained_on_one[0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(state, trained_on_one[1], rtol=1e-4, atol=1e-6)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(("world", "micro_batches"), [(2, 1), (1, 4), (2, 4)])
def test_every_device_and_micro_batch_draws_its_own_elements_only(world: int, micro_batches: int) -> None:
    plan, _, _ = plan_of(NOISY, Layout(world, micro_batches), 16)
    steps = [s for a in plan.actors if a.body is not None for s in plan.bodies[a.body].steps if s.op == UNIFORM]
    of_batch = [s.args[HAS] for s in steps if s.args[WHOLE][0] == 16 and len(s.args[WHOLE]) > 1]
    assert len(of_batch) >= 8
    assert {sum(n for _, n in has[0]) for has in of_batch} == {16 // world // micro_batches}


# what cannot be drawn


@torch.library.custom_op("actorflow_tests::noise", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def noise(x: Tensor) -> Tensor:
    return torch.randn_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_custom_op_that_draws_runs_on_one_device_and_is_refused_on_several() -> None:
    x = torch.zeros(8, 3)
    first, second = drawn(lambda x: (noise(x), noise(x)), x)
    assert not torch.equal(first, second)
    with pytest.raises(CaptureError, match=r"draws random numbers with actorflow_tests\.noise"):
        drawn(noise, x, world=2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: torch.randint(-(2**63), 2**63 - 1, (3,)), r"at most 2\*\*63 different ones"),
        (lambda: torch.randn(3, dtype=torch.complex32), "complex64 or wider"),
        (lambda: torch.rand(3, 2, out=torch.empty(2, 3)), "given out= of shape"),
    ],
)
def test_what_cannot_be_drawn_is_said(function: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        drawn(function)
