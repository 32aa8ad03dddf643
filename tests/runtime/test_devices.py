"""The devices: what the CPU's does at once, what CUDA's asks of torch, and in which order."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorflow.devices import Cpu, Cuda, cuda, make_device
from actorflow_compiler.core.errors import ClusterError, PlanError

GPU = torch.device("cuda", 1)
POOL = 32  # streams of one priority, in torch


class FakeCuda:
    """Stands for ``torch.cuda``; every call that orders work goes to ``log``."""

    def __init__(self) -> None:
        self.log: list[str] = []
        log, made, asked = self.log, {}, [0, 0]
        now = threading.local()

        class Stream:
            def __init__(self, device: torch.device, priority: int = 0) -> None:
                place = min(-priority, 1)  # of its pool: this GPU knows two priorities
                asked[place] += 1
                self.cuda_stream = 1 + place * POOL + (asked[place] - 1) % POOL  # as torch hands them out
                made.setdefault(self.cuda_stream, f"s{len(made) + 1}")
                self.name, self.device, self.priority = made[self.cuda_stream], device, priority

            def wait_event(self, event: Any) -> None:
                log.append(f"{self.name} waits for {event.name}")

        class Event:
            count = 0

            def __init__(self, blocking: bool = False) -> None:
                assert blocking, "a thread that waits must leave its core to who launches"
                Event.count += 1
                self.name = f"e{Event.count}"

            def record(self, stream: Any) -> None:
                log.append(f"{self.name} on {stream.name}")

            def query(self) -> bool:
                return False

            def synchronize(self) -> None:
                log.append(f"host waits for {self.name}")

        class Context:
            def __init__(self, stream: Any) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                self.before, now.stream = current(), self.stream

            def __exit__(self, *_: object) -> None:
                now.stream = self.before

        default = SimpleNamespace(name="default", cuda_stream=0)

        def current(device: torch.device | None = None) -> Any:
            return getattr(now, "stream", default)

        self.Stream, self.Event, self.stream, self.current_stream = Stream, Event, Context, current
        self.set_device = lambda device: log.append(f"set {device}")
        self.synchronize = lambda device: log.append(f"synchronize {device}")
        self.get_device_name = lambda device: f"the name of {device}"


class FakeTensor:
    """A tensor that says on which stream it is copied."""

    shape, dtype = (2,), torch.float32

    def __init__(self, fakes: FakeCuda, device: str, pinned: bool = False) -> None:
        self.fakes, self.device, self.pinned = fakes, torch.device(device), pinned
        self.is_cuda = self.device.type == "cuda"

    def is_pinned(self) -> bool:
        return self.pinned

    def pin_memory(self) -> FakeTensor:
        self.fakes.log.append("pin")
        return FakeTensor(self.fakes, "cpu", True)

    def to(self, device: torch.device, non_blocking: bool = False) -> FakeTensor:
        assert non_blocking
        assert self.pinned or self.is_cuda
        self.fakes.log.append(f"to {device} on {self.fakes.current_stream().name}")
        return FakeTensor(self.fakes, str(device))

    def copy_(self, source: FakeTensor, non_blocking: bool = False) -> FakeTensor:
        assert non_blocking
        assert self.pinned
        self.fakes.log.append(f"fetch on {self.fakes.current_stream().name}")
        return self

    def record_stream(self, stream: Any) -> None:
        self.fakes.log.append(f"used on {stream.name}")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """CUDA's device with a log in place of torch's streams and events."""
    found = FakeCuda()

    def empty(shape: Any, dtype: torch.dtype, pin_memory: bool) -> FakeTensor:
        return FakeTensor(found, "cpu", pin_memory)

    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=found, device=torch.device, empty=empty, uint8=torch.uint8))
    return found


def test_each_queue_is_one_stream_and_what_moves_data_goes_before_what_computes(fakes: FakeCuda) -> None:
    device = Cuda(1)
    queues = {name: device.queue(name) for name in ("compute", "comm", "send:1")}
    assert all(device.queue(name) is queue for name, queue in queues.items())
    streams = {name: queue.stream for name, queue in queues.items()}
    assert len({stream.name for stream in streams.values()}) == 3
    assert {stream.device for stream in streams.values()} == {GPU}
    assert streams["compute"].priority > streams["comm"].priority == streams["send:1"].priority


def test_no_two_queues_share_a_stream_and_who_comes_when_there_is_none_is_told(fakes: FakeCuda) -> None:
    device = Cuda(1)
    fakes.Stream(GPU, -1)  # the user's own
    compute = device.queue("compute")
    others = [device.queue(f"receive:{rank}") for rank in range(POOL)]
    assert len({queue.stream.cuda_stream for queue in (compute, *others)}) == POOL + 1
    with pytest.raises(ClusterError, match=r"cuda:1: queue receive:99 needs a stream of its own, .* the 33 that"):
        device.queue("receive:99")
    assert device.queue("receive:7") is others[7]


def test_a_queue_waits_for_the_event_that_another_left(fakes: FakeCuda) -> None:
    device = Cuda()
    one, other = device.queue("compute"), device.queue("comm")
    mark = one.mark()
    other.wait(mark)
    other.wait(None)
    assert not mark.passed()
    mark.wait_on_host()
    assert fakes.log == ["e1 on s1", "s2 waits for e1", "host waits for e1"]


def test_a_mark_of_another_kind_of_device_is_refused(fakes: FakeCuda) -> None:
    with pytest.raises(PlanError, match="queue compute: a mark of another kind of device was found: SimpleNamespace"):
        Cuda().queue("compute").wait(SimpleNamespace())  # type: ignore[arg-type]


def test_contexts_nest_and_here_is_the_innermost(fakes: FakeCuda) -> None:
    device = Cuda()
    assert device.here().stream.name == "default"
    with device.queue("compute").context():
        with device.queue("comm").context():
            assert device.here().stream is device.queue("comm").stream
        assert device.here().stream is device.queue("compute").stream
    assert device.here().stream.name == "default"


def test_host_memory_goes_through_pinned_memory_on_the_queue_that_asks(fakes: FakeCuda) -> None:
    device = Cuda(1)
    here: Any = FakeTensor(fakes, "cuda:1")
    given: list[Any] = [FakeTensor(fakes, "cpu"), FakeTensor(fakes, "cpu", True), here, FakeTensor(fakes, "cuda:0")]
    with device.queue("source").context():
        found = device.to_device(given)
    assert found[2] is here
    assert [t.device for t in found] == [GPU] * 4
    assert fakes.log == ["pin", "to cuda:1 on s1", "to cuda:1 on s1", "to cuda:1 on s1"]


def test_a_fetch_follows_what_the_thread_launched_and_blocks_only_that_thread(fakes: FakeCuda) -> None:
    device = Cuda()
    there: Any = FakeTensor(fakes, "cpu")
    tensors: list[Any] = [FakeTensor(fakes, "cuda:0"), there]
    with device.queue("sink").context():
        found = device.to_host(tensors)
    assert found[1] is there
    assert found[0].device.type == "cpu"
    assert fakes.log == ["e1 on s1", "s2 waits for e1", "fetch on s2", "e2 on s2", "host waits for e2"]
    fakes.log.clear()
    assert device.to_host([there]) == [there]
    assert not fakes.log


def test_memory_that_others_free_is_kept_for_a_stream_without_waiting(fakes: FakeCuda) -> None:
    tensors: list[Any] = [FakeTensor(fakes, "cuda:0"), FakeTensor(fakes, "cpu")]
    Cuda().queue("source").use(tensors)
    assert fakes.log == ["used on s1"]


def test_threads_and_measurements_are_of_the_device(fakes: FakeCuda) -> None:
    device = Cuda(1)
    device.prepare_thread()
    device.synchronize()
    assert fakes.log == ["set cuda:1", "synchronize cuda:1"]
    assert device.label(4) == "the name of cuda:1"
    assert device.ahead


def test_on_the_cpu_everything_is_done_when_its_call_returns() -> None:
    device = make_device("cpu")
    assert isinstance(device, Cpu)
    assert not device.ahead
    queue = device.queue("compute")
    x = torch.ones(3)
    with queue.context():
        (there,) = device.to_device([x])
    assert there is x
    assert device.to_host([x])[0] is x
    assert queue.mark().passed()
    queue.wait(queue.mark())
    queue.wait(None)
    assert device.staging(5).shape == (5,)
    assert device.label(2) == "cpu-2"


@pytest.mark.parametrize(
    ("place", "said"), [("cuda:99", "cuda:99 .* it shows cpu: 1, cuda:"), ("meta", "known kinds are cpu, cuda")]
)
def test_a_device_that_is_not_there_is_named_with_those_that_are(place: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        make_device(place)
