"""Compiled bodies are made once for all ranks of a machine, kept on disk, and loaded only where they fit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actorflow.runtime.bodies import body_store as store_module
from actorflow.runtime.bodies import inductor
from actorflow.runtime.bodies.body_store import BodyStore, body_store, key_of
from actorflow.runtime.bodies.inductor import Compilations, WantedBody, compile_bodies
from actorflow.runtime.bodies.kernels import Kernels
from actorflow.support.user_folder import UserFolder
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.sbp import B
from actorflow_compiler.core.torch_internals import CompiledGraph
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.plan import Body, OfInput, Step
from runtime.programs import Program, body, on, spec, step

LIMIT = 120.0  # seconds, which only a hang takes
CPU = torch.device("cpu")
KERNELS = Kernels(CPU, {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of bodies in a cache of this test's own."""
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ACTORFLOW_CACHE_BODIES", "1")
    monkeypatch.setattr(store_module, "_told", set())
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / "bodies"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes of the graphs that are compiled from now on, one for each."""
    calls: list[str] = []
    usual = inductor.compile_graph

    def counted(graph: Any, operands: Any, mode: str) -> CompiledGraph:
        calls.append(mode)
        return usual(graph, operands, mode)

    monkeypatch.setattr(inductor, "compile_graph", counted)
    return calls


def chain(number: float = 2.0) -> Body:
    """gelu(x + number) * y, and its sum over rows."""
    return Body(
        2,
        (
            Step("aten.add.Tensor", (Ref(0), number), (), (2,)),
            Step("aten.gelu.default", (Ref(2),), (), (3,)),
            Step("aten.mul.Tensor", (Ref(3), Ref(1)), (), (4,)),
            Step("aten.sum.dim_IntList", (Ref(4), (1,)), (), (5,)),
        ),
        (4, 5),
    )


def operands() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(32, 48, generator=random) for _ in range(2)]


def wanted(number: float = 2.0) -> WantedBody:
    return WantedBody.of(chain(number), operands(), autotune=False)


def made(*bodies: WantedBody, store: BodyStore | None = None) -> Compilations:
    with torch.no_grad():
        return compile_bodies(bodies, KERNELS, store or body_store(), lambda text: None)


def lock_of_a_body_to_be_compiled(folder: Path) -> str:
    """The name of the lock of ``wanted()``, which was compiled once, and whose file is gone."""
    made(wanted())
    (path,) = folder.glob("body-*.actorflow")
    path.unlink()
    return f"{path.stem}.lock"


def outputs(found: Compilations, one: WantedBody) -> list[Tensor]:
    given: list[Any] = operands()
    with torch.no_grad():
        result = found.kernels[one](given)
    assert not given
    return list(result)


@pytest.mark.slow
def test_a_body_that_is_loaded_computes_what_the_compiled_one_does_bit_by_bit(
    folder: Path, compiled: list[str]
) -> None:
    one = wanted()
    first, second = made(one), made(one)
    assert (first.compiled, first.loaded, second.compiled, second.loaded) == (1, 0, 0, 1)
    assert len(compiled) == 1
    for mine, theirs in zip(outputs(first, one), outputs(second, one), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
    plain = KERNELS.kernel(one.body)(list(operands()))
    torch.testing.assert_close(outputs(second, one), list(plain))


def _compute(variables: dict[str, str], compiler: bool, answer: Any) -> None:
    """In a new process, which can compile C++ only with ``compiler``: make the body, and compute with it."""
    try:
        os.environ.clear()  # those of the process that it was forked from, which another test may have started
        os.environ.update(variables)
        from torch._inductor import cpp_builder

        if not compiler:
            cpp_builder.CppBuilder.build = None
        one = wanted()
        found = made(one)
        assert not found.errors, found.errors
        answer.send((found.compiled, found.loaded, [x.numpy() for x in outputs(found, one)]))
    except Exception:
        answer.send(traceback.format_exc())


def in_a_new_process(cache: Path, compiler: bool = False) -> tuple[int, int, list[Tensor]]:
    """How many bodies were compiled there, how many loaded, and what they computed; ``cache``: inductor's own.

    Without ``compiler``, C++ cannot be compiled there.
    """
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    variables = dict(os.environ) | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    process = context.Process(target=_compute, args=(variables, compiler, there))
    process.start()
    there.close()  # so that the end of the process ends the wait
    answer = here.recv()
    process.join(LIMIT)
    assert not isinstance(answer, str), answer
    compiled, loaded, found = answer
    return compiled, loaded, [torch.from_numpy(one) for one in found]


@pytest.mark.slow
def test_a_kept_body_is_loaded_by_another_process_and_needs_no_compiler(folder: Path, tmp_path: Path) -> None:
    """Both are new, as ranks are: what other tests have set in this process is not theirs."""
    compiled, loaded, before = in_a_new_process(tmp_path / "one", compiler=True)
    assert (compiled, loaded) == (1, 0)
    compiled, loaded, after = in_a_new_process(tmp_path / "other")
    assert (compiled, loaded) == (0, 1)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(before, after, strict=True))


def test_a_body_that_no_file_can_hold_is_compiled_by_each_rank_at_once() -> None:
    one = wanted()
    assert key_of(one.body, one.operands, one.autotune, {}, ()) is not None
    on_gpu = [(*form, torch.device("cuda:0")) for *form, _ in one.operands]
    assert key_of(one.body, on_gpu, one.autotune, {}, ()) is None


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("what", ["body", "operands", "threads", "torch", "code"])
def test_what_a_body_depends_on_changes_its_key(
    what: str, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = other = wanted()
    made(one)
    threads = torch.get_num_threads()
    try:
        if what == "body":
            other = wanted(3.0)
        elif what == "operands":
            other = WantedBody.of(chain(), [x.t().contiguous().t() for x in operands()], autotune=False)
        elif what == "threads":
            torch.set_num_threads(threads + 1)
        elif what == "torch":
            monkeypatch.setattr(torch, "__version__", "2.99.0")
        else:
            monkeypatch.setattr(store_module, "_code", lambda: ("other",))
        assert made(other).loaded == 0
    finally:
        torch.set_num_threads(threads)
    assert len(compiled) == 2


def test_an_op_of_the_script_is_not_kept(folder: Path, compiled: list[str]) -> None:
    kernels = Kernels(CPU, {"twice": lambda x: x + x})
    twice = Body(1, (Step("actorflow.twice", (Ref(0),), (), (1,)), Step("aten.neg.default", (Ref(1),), (), (2,))), (2,))
    one = WantedBody.of(twice, operands()[:1], autotune=False)
    for _ in range(2):
        with torch.no_grad():
            assert compile_bodies([one], kernels, body_store(), lambda text: None).compiled == 1
    assert len(compiled) == 2
    assert not list(folder.glob("body-*.actorflow"))


@pytest.mark.parametrize("how", ["cut off", "changed", "old", "foreign"])
def test_a_file_that_is_not_whole_is_told_of_and_made_anew(
    how: str, folder: Path, compiled: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    one = wanted()
    expected = outputs(made(one), one)
    (path,) = folder.glob("body-*.actorflow")
    data = path.read_bytes()
    changed = bytearray(data)
    changed[-100] ^= 1
    path.write_bytes(
        {
            "cut off": data[:-10],
            "changed": bytes(changed),
            "old": data.replace(b"body 1", b"body 0", 1),
            "foreign": b"",
        }[how]
    )
    assert made(one).compiled == 1
    assert "is ignored, and the body compiled" in capfd.readouterr().err
    again = made(one)
    assert again.loaded == 1
    assert all(map(torch.equal, expected, outputs(again, one)))
    assert len(compiled) == 2


def test_a_folder_that_others_may_write_to_is_not_used(
    folder: Path, compiled: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    one = wanted()
    made(one)
    folder.chmod(0o777)
    assert made(one).compiled == 1
    assert "others may write to" in capfd.readouterr().err
    assert len(compiled) == 2


def test_without_a_cache_every_rank_compiles(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORFLOW_CACHE", "0")
    one = wanted()
    assert [made(one).compiled for _ in range(2)] == [1, 1]
    assert not folder.exists()


def test_what_another_one_compiles_is_waited_for_last_and_loaded(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, free = wanted(), wanted(3.0)
    began, finish = threading.Event(), threading.Event()
    usual = inductor._compile
    of_thread: dict[str, list[WantedBody]] = {}

    def slowly(one: WantedBody, kernels: Kernels) -> Any:
        of_thread.setdefault(threading.current_thread().name, []).append(one)
        if one == busy:
            began.set()
            assert finish.wait(LIMIT)
        return usual(one, kernels)

    def told(text: str) -> None:
        if "waiting" in text:
            finish.set()

    monkeypatch.setattr(inductor, "_compile", slowly)
    other = threading.Thread(target=lambda: made(busy), name="other")
    other.start()
    assert began.wait(LIMIT)
    with torch.no_grad():
        found = compile_bodies([busy, free], KERNELS, body_store(), told)
    other.join(LIMIT)
    assert of_thread == {"other": [busy], threading.current_thread().name: [free]}
    assert (found.compiled, found.loaded) == (1, 1)
    assert list(found.kernels) == [free, busy]


def _hold(path: Path, name: str, has: Any) -> None:
    with UserFolder(path).locked(name, wait=False) as held:
        assert held
        has.set()
        signal.pause()


@pytest.mark.slow
def test_a_process_that_dies_while_it_compiles_holds_up_nobody(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, lock = wanted(), lock_of_a_body_to_be_compiled(folder)
    context = multiprocessing.get_context("forkserver")
    has = context.Event()
    holder = context.Process(target=_hold, args=(folder, lock, has))
    holder.start()
    assert has.wait(LIMIT)
    assert holder.pid is not None
    said = []

    def told(text: str) -> None:
        said.append(text)
        if "waiting" in text:
            os.kill(holder.pid or 0, signal.SIGKILL)

    with torch.no_grad():
        found = compile_bodies([one], KERNELS, body_store(), told)
    holder.join(LIMIT)
    assert any("waiting" in text for text in said)
    assert found.compiled == 1
    assert len(compiled) == 2


def test_a_process_that_stands_still_is_not_waited_for_without_end(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, lock = wanted(), lock_of_a_body_to_be_compiled(folder)
    monkeypatch.setattr(store_module, "LONGEST", 0.1)
    with UserFolder(folder).locked(lock, wait=True) as held:
        assert held
        assert made(one).compiled == 1


def test_a_full_disk_stops_nobody(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(folder: UserFolder, name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(UserFolder, "put", full)
    store = body_store()
    found = made(wanted(), wanted(3.0), store=store)
    assert found.compiled == 2
    assert not found.errors
    assert capfd.readouterr().err.count("No space left") == 1


def test_bodies_used_longest_ago_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST", 2)
    store = body_store()
    assert store is not None
    names = [digit * 64 for digit in "abc"]
    for age, name in enumerate(names[:2]):
        store.add(name, b"x")
        os.utime(folder / f"body-{name}.actorflow", (age, age))
    assert store.find(names[0], bytes) == b"x"  # the older one is used now
    store.add(names[2], b"x")
    assert [store.find(name, bytes) for name in names] == [b"x", None, b"x"]


def test_ranks_with_equal_bodies_compile_each_once(folder: Path, compiled: list[str]) -> None:
    p = Program(name="twins")
    steps = [step("aten.add.Tensor", Ref(k), 1.0 + k, outs=[k + 1]) for k in range(4)]
    for rank in range(2):
        (x,) = p.actor(f"x{rank}", OfInput("x"), out=[spec(32, 48)], kind="source", queue="source", rank=rank)
        (y,) = p.actor(f"A{rank}", x, body=body(1, *steps, outputs=[4]), out=[spec(32, 48)], rank=rank)
        p.result(y, on(0, 1), (B,), (32, 48), rank=rank)
    plan = replace(p.plan(), mode=Mode.INDUCTOR)
    for _ in range(2):  # the second start compiles nothing
        with LocalCluster(plan) as cluster:
            (found,) = cluster.run({"x": torch.zeros(32, 48)})
        assert found.unique().tolist() == [10.0]
        assert len(compiled) == 1
