"""What is built without memory becomes what the eager lines make, whole or in parts."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import actorflow as flow
from actorflow.deferred import DeferredTensor, digest, mersenne, replay
from actorflow.runtime.parts import part
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import parse_nd
from fewer import fewer
from gpt import GPT
from models import Cnn, Lstm, Mlp

SEED = 5


def holding(**tensors: Tensor) -> nn.Module:
    """A module with these parameters (and, where they are no floats, buffers)."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            module.register_parameter(name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    return module


def transformer() -> nn.Module:
    return nn.Transformer(16, 2, 2, 1, 32, batch_first=True)


def embedding() -> nn.Module:
    return nn.Embedding(30, 8, padding_idx=4)


def initialisers() -> nn.Module:
    """Each of torch's, on even and odd sizes."""
    init: list[Callable[[Tensor], Any]] = [
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        lambda w: nn.init.trunc_normal_(w, std=0.02),
        lambda w: nn.init.trunc_normal_(w, mean=0.4, a=0.0, b=0.3),
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        lambda w: nn.init.sparse_(w, 0.3),
        nn.init.eye_,
        lambda w: nn.init.constant_(w, 0.25),
    ]
    weights = {}
    for i, initialise in enumerate(init):
        for shape in ((8, 16), (7, 5), (3, 1)):
            weights[f"w{i}_{shape[0]}"] = initialise(torch.empty(shape))
    return holding(**weights)


def few_numbers() -> nn.Module:
    """Fewer than 16, of which torch draws two at a time and keeps one back."""
    return holding(a=torch.randn(3), b=torch.empty(5, 40).normal_(), c=torch.randn(7), d=torch.randn(1))


def factories() -> nn.Module:
    scaled = torch.randn(6, 20) * 0.5 + torch.linspace(0, 1, 20)
    mask = torch.tril(torch.ones(9, 9, dtype=torch.bool)).view(1, 1, 9, 9)
    inverse = 1.0 / 10000 ** (torch.arange(0, 16, 2).float() / 16)
    return holding(scaled=scaled, mask=mask, inverse=inverse, order=torch.randperm(20), rand=torch.rand(4, 9))


def in_place_through_views() -> nn.Module:
    w = torch.empty(8, 6)
    w[:, 1:3].normal_()
    w[:, 3:].uniform_(-1, 1)
    w[:, 0] = torch.arange(8.0)
    w.t_()
    w[w > 1.5] = 0
    w.t().reshape(-1)[::5].fill_(9)
    return holding(w=w, view=w[1:3], other=torch.complex(w, w).abs())


def control_flow() -> nn.Module:
    """Values decide what is made."""
    layers = [nn.Linear(4, 1 + int(10 * rate)) for rate in torch.linspace(0, 0.5, 3).tolist()]
    if (layers[0].weight > 0).any():
        layers.append(nn.Linear(int(torch.randint(3, 9, (1,))), 2))
    return nn.ModuleList(layers)


def generators() -> nn.Module:
    own = torch.Generator().manual_seed(1)
    a = torch.empty(4, 8).normal_(generator=own)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        b = torch.randn(40)
    c = torch.randn(40)
    saved = torch.get_rng_state()
    d = torch.randn(30)
    torch.set_rng_state(saved)
    return holding(a=a, b=b, c=c, d=d, again=torch.randn(30), e=torch.randn(5, 5, generator=own))


def converted() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    model = nn.Sequential(nn.Linear(20, 30), Cnn().double(), nn.Linear(9, 9).half())
    torch.set_default_dtype(torch.float32)
    return model.requires_grad_(False)


def tied_and_copied() -> nn.Module:
    model = GPT(layers=1, width=16, heads=2, context=8)
    model.head.weight = model.embed.weight
    model.target = copy.deepcopy(model.blocks[0])
    with torch.no_grad():
        for slow, fast in zip(model.target.parameters(), model.blocks[0].parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
    model.blocks[0].up.weight.data.copy_(torch.randn(64, 16))
    return model


def parametrised() -> nn.Module:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(12, 5))
    return nn.Sequential(layer, nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)))


def hugging_face(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        config = transformers.AutoConfig.for_model(name, vocab_size=50, **small)
        model: nn.Module = transformers.AutoModel.from_config(config)
        return model

    return make


HUGGING_FACE = ("gpt2", "llama", "bert", "t5", "mamba")
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f.__name__: f for f in (Mlp, Cnn, Lstm, transformer, embedding, initialisers, few_numbers, factories)},
    **{f.__name__: f for f in (in_place_through_views, control_flow, generators, converted, tied_and_copied)},
    "parametrised": parametrised,
    "GPT": lambda: GPT(layers=2, width=24, heads=2, context=10),
    **{name: hugging_face(name) for name in HUGGING_FACE},
}


def built(make: Callable[[], nn.Module], deferred: bool) -> tuple[nn.Module, Tensor]:
    """The model, and the state in which it leaves torch's generator."""
    torch.manual_seed(SEED)
    torch.randn(3)  # leaves a number back
    if deferred:
        with flow.deferred_init():
            model = make()
    else:
        model = make()
    return model, torch.get_rng_state()


def state(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly everything is made a stretch at a time."""
    monkeypatch.setattr(replay, "CHUNK", 48)


def check(make: Callable[[], nn.Module]) -> None:
    eager, after_eager = built(make, deferred=False)
    model, after = built(make, deferred=True)
    assert torch.equal(after, after_eager)
    expected, found = state(eager), state(model)
    assert list(found) == list(expected)
    assert any(isinstance(t, DeferredTensor) for t in found.values())
    for name, value in expected.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        assert found[name].stride() == value.stride(), name
        assert isinstance(found[name], nn.Parameter) == isinstance(value, nn.Parameter), name
        assert found[name].requires_grad == value.requires_grad, name
    flow.materialize(model)
    assert torch.equal(torch.get_rng_state(), after)
    found = state(model)
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        assert torch.equal(found[name], value), name
    assert sharing(found) == sharing(expected)


def sharing(tensors: dict[str, Tensor]) -> list[int]:
    """For each tensor the first one in the same memory."""
    memory = [t.untyped_storage().data_ptr() for t in tensors.values()]
    return [memory.index(one) for one in memory]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", MODELS)
def test_a_deferred_model_becomes_the_eager_one(name: str) -> None:
    check(MODELS[name])


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in HUGGING_FACE])
def test_it_does_so_too_where_few_elements_are_made_at_a_time(name: str) -> None:
    check(MODELS[name])


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_part_of_a_deferred_tensor_is_that_part_of_the_eager_one(world: int) -> None:
    shapes = [(20, 12), (7, 5), (50, 1), (3, 16, 10), (2, 3), (100,), (33, 40)]

    def make() -> nn.Module:
        tensors = [torch.randn(shape) * 0.1 for shape in shapes]
        tensors += [nn.init.uniform_(torch.empty(shape), -1, 2).to(torch.float64) for shape in shapes]
        for t in tensors:
            t[1:2].zero_()
        return holding(**{f"w{i}": t for i, t in enumerate(tensors)})

    eager, model = state(built(make, deferred=False)[0]), state(built(make, deferred=True)[0])
    place, grid = placement("cpu", range(world)), placement("cpu", [[0, 1], [2, 3]])
    for name, whole in eager.items():
        for dim in range(whole.dim()):
            for index in range(world):
                sbp = parse_nd(f"S({dim})")
                found = part(model[name], place, sbp, index)
                assert torch.equal(found, part(whole, place, sbp, index)), (name, sbp, index)
                assert found.untyped_storage().nbytes() == found.numel() * found.itemsize
            nd = parse_nd(f"[S({dim}), S(0)]")
            assert torch.equal(part(model[name], grid, nd, 2), part(whole, grid, nd, 2)), (name, nd)


@settings(max_examples=fewer(25), deadline=None)
@given(drawn=st.integers(0, 1300), words=st.one_of(st.integers(0, 3000), st.integers(0, 300_000)))
def test_a_generators_state_is_computed_as_drawing_leaves_it(drawn: int, words: int) -> None:
    generator = torch.Generator().manual_seed(drawn)
    torch.empty(drawn).uniform_(generator=generator)
    start = generator.get_state()
    torch.empty(words).uniform_(generator=generator)
    assert torch.equal(mersenne.advance(start, words), generator.get_state())


def test_a_far_state_follows_from_a_nearer_one() -> None:
    start = torch.Generator().manual_seed(1).get_state()
    near, far = 10**9 + 7, 10**12
    assert torch.equal(mersenne.advance(start, far), mersenne.advance(mersenne.advance(start, near), far - near))


def test_a_model_far_beyond_memory_is_built_at_once_and_gives_a_part() -> None:
    shape = (3_000_000, 100_000)  # 1.2 TB
    with flow.deferred_init():
        huge = nn.Linear(*reversed(shape), bias=False)
        nn.init.normal_(huge.weight, std=0.5)
    place = placement("cpu", range(100_000))
    found = part(huge.weight, place, parse_nd("S(0)"), 70_000)
    assert found.shape == (30, 100_000)
    assert abs(found.std().item() - 0.5) < 0.01
    assert not torch.equal(found[:15], found[15:])


def test_a_loop_that_looks_at_values_takes_no_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        w = torch.empty(60, 50)
        drawn = w.normal_()
        while (outside := drawn.abs() > 1.5).any():
            drawn = torch.where(outside, torch.empty_like(drawn).normal_(), drawn)
        return holding(w=w.copy_(drawn))

    monkeypatch.setattr(replay, "CHUNK", 64)
    expected, _ = built(make, deferred=False)
    whole: list[int] = []
    replayed = replay._replayed
    monkeypatch.setattr(replay, "_replayed", lambda view: whole.append(view.numel) or replayed(view))
    found, _ = built(make, deferred=True)
    part(found.w, placement("cpu", range(60)), parse_nd("S(0)"), 7)
    assert max(whole, default=0) <= 1
    assert torch.equal(flow.materialize(found).w, expected.w)
    assert expected.w.abs().max() <= 1.5


def test_ops_on_a_deferred_model_are_followed_after_it_was_built() -> None:
    models = [built(lambda: Mlp(16), deferred)[0] for deferred in (False, True)]
    states = []
    for model in models:
        torch.manual_seed(1)
        model.second.apply(lambda m: nn.init.normal_(m.weight, std=0.3))
        states.append(torch.get_rng_state())
        model.first.weight.data.mul_(2)
        model.first.weight.data[3:5] = 1
        with torch.no_grad():
            model.second.bias.copy_(torch.arange(16.0))
        model.to(torch.bfloat16)
        model.head.load_state_dict({"weight": torch.ones(10, 16), "bias": torch.zeros(10)})
    assert torch.equal(*states)
    assert isinstance(models[1].head.weight, DeferredTensor)
    flow.materialize(models[1])
    torch.testing.assert_close(state(models[1]), state(models[0]), rtol=0, atol=0)


def test_a_model_that_was_made_real_works_wherever_it_was_held() -> None:
    with flow.deferred_init():
        model = Lstm()
    weight = model.head.weight
    weight.note = "kept"
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    assert flow.materialize(model) is model
    flow.materialize(optimizer)
    assert model.head.weight is weight
    assert weight.note == "kept"
    before = weight.detach().clone()
    assert torch.equal(optimizer.state[weight]["sum"], torch.full_like(weight, 0.5))
    F.cross_entropy(model(torch.randn(4, 64)), torch.arange(4)).backward()
    optimizer.step()
    assert not torch.equal(weight, before)


def test_what_is_not_initialisation_says_what_to_do() -> None:
    with flow.deferred_init():
        model = Mlp()
        total = model.first.bias.sum().item()  # belongs to the initialisation
    assert isinstance(total, float)
    uses: list[Callable[[], Any]] = [
        lambda: model(torch.randn(2, 64)),
        lambda: model.first.weight.sum().item(),
        lambda: model.first.weight.tolist(),
        lambda: model.first.weight.detach().numpy(),
        lambda: torch.randn(3).add_(model.first.bias[:3]),
        lambda: torch.equal(model.first.weight, model.first.weight),
    ]
    for use in uses:
        with pytest.raises(StateError, match=r"deferred .*float32.*use it in a job.*flow\.materialize\(model\)"):
            use()
    assert repr(model.first.weight) == "<deferred parameter float32[32, 64]>"


def test_a_tensor_that_was_copied_in_must_not_change_before_it_is_needed() -> None:
    source = torch.randn(200, 200)
    with flow.deferred_init():
        target = torch.empty(200, 200).copy_(source)
        small = torch.empty(4).copy_(source[0, :4])
    expected = source[0, :4].clone()
    source.zero_()
    assert torch.equal(flow.materialize(small), expected)
    with pytest.raises(StateError, match="changed afterwards"):
        flow.materialize(target)


def test_a_deferred_tensor_is_saved_and_loaded_with_its_values() -> None:
    eager, model = (built(Mlp, deferred)[0] for deferred in (False, True))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file), eager.state_dict(), rtol=0, atol=0)
    other = Mlp()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.state_dict(), eager.state_dict(), rtol=0, atol=0)


def test_equal_digests_are_those_of_equal_values() -> None:
    def one(seed: int, scale: float = 1.0, skip: int = 0, value: float = 0.0) -> int:
        torch.manual_seed(seed)
        with flow.deferred_init():
            torch.randn(skip + 16)
            tensor = torch.empty(5, 5).normal_(0, scale)
            tensor[2] = torch.tensor([value] * 5)
        return digest(tensor)

    assert one(0) == one(0)
    assert len({one(0), one(1), one(0, 2.0), one(0, skip=1), one(0, value=1.0)}) == 5


def test_an_error_while_building_leaves_the_generator_as_eager_lines_do() -> None:
    torch.manual_seed(0)
    torch.randn(100)
    expected = torch.randn(5)
    torch.manual_seed(0)
    with contextlib.suppress(KeyError), flow.deferred_init():
        torch.randn(100)
        raise KeyError
    assert torch.equal(torch.randn(5), expected)
    assert type(torch.zeros(3)) is Tensor
