"""Calls of jobs go in, in the order of the script; plans, issued calls and handles on their results come out.

There is one session in a process: one cluster, one worker, one set of variables, shared by all jobs.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from actorflow import tree
from actorflow.arguments import Arguments, checksum, flatten
from actorflow.find import Names, find
from actorflow.lazy import known_now
from actorflow.runtime import cluster as clusters
from actorflow.runtime import trace
from actorflow.runtime.agreement import report
from actorflow.runtime.call import Call
from actorflow.runtime.cluster import Alone, Cluster
from actorflow.runtime.compiling import Made, Order, hints_of, make_everywhere, make_plan
from actorflow.runtime.costs import Target, threads_of
from actorflow.runtime.data_plane.gloo import GlooPlane
from actorflow.runtime.failure import Failure
from actorflow.runtime.gradients import Left
from actorflow.runtime.keys import Keys, fresh, rates, spoken
from actorflow.runtime.messages import DataPlane
from actorflow.runtime.optimizer_state import count_as_stepped
from actorflow.runtime.planes import unshare
from actorflow.runtime.results import Results
from actorflow.runtime.state import Variables
from actorflow.runtime.worker import Worker
from actorflow.seeds import seeds
from actorflow_compiler.errors import CallError
from actorflow_compiler.gradients import Gradients
from actorflow_compiler.infer import Goal
from actorflow_compiler.optimizers import setting
from actorflow_compiler.plan import OfInput, OfScalar, Plan, Variable
from actorflow_compiler.random_ops import SEED
from actorflow_compiler.variables import State

__all__ = ["Compiled", "PlanReady", "Session", "current", "explain", "finish"]

CHECK_CONTENTS = 100  # calls of one plan between two looks at the contents of the arguments


class PlanReady(BaseException):
    """Ends a script whose plan was all that was wanted."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(f"the plan of job {plan.name!r} is ready")
        self.plan = plan


class JobLike(Protocol):
    """What a session needs to know of a job."""

    name: str
    type: str
    micro_batches: int
    goal: Goal
    schedule: str
    function: Any
    signature: Any
    model: Any
    optimizer: Any
    plans: dict[Any, Compiled]
    keys: Keys | None
    last: Compiled | None


@dataclass(slots=True)
class Compiled:
    """A plan that is installed, and how a call feeds it."""

    spoken: str  # a call of it as people write it
    number: int
    plan: Plan
    shape: tree.Shape
    inputs: frozenset[str]  # arguments that this rank's sources read
    scalars: tuple[tuple[str, torch.optim.Optimizer, int, str], ...]  # (name, optimizer, group, setting)
    optimizers: tuple[torch.optim.Optimizer, ...]
    gradients: Gradients
    calls: int = 0


class Session:
    """One process's part of a run."""

    def __init__(self, cluster: Cluster | Alone) -> None:
        self.cluster = cluster
        self.rank, self.world = cluster.rank, cluster.world
        self.names = Names()
        self.calls = 0  # gated so far
        self.worker: Worker | None = None
        self.variables: Variables
        self.results: Results
        self._plans = 0
        self._stepped: set[str] = set()  # optimizers that a plan has run
        self._left = Left()
        self._seed = 0  # of random ops, where the script does not set it: the master's, known with the first plan
        self._capturing = False
        self._compiled: set[JobLike] = set()  # jobs that have a plan
        self._pretended: dict[str, Variable] = {}  # layouts that plans of a pretended cluster decided
        self._changed = threading.Condition()  # guards the next four
        self._issued: deque[tuple[int, Call]] = deque()  # calls that may be under way, by their number
        self._begun = 0  # calls issued so far, counted as calls are
        self._gone: set[int] = set()  # calls that every rank has made and this one has not issued yet
        self._numbers: dict[int, int] = {}  # call → its number in the worker, until it may go
        cluster.on_go(self._go)
        cluster.serve(self._serve)
        cluster.on_failure(self._failed)

    # -- a call ------------------------------------------------------------------------------------

    def call(self, job: JobLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a job on this rank; returns at once with what the job's function returns, in handles."""
        if self._capturing:  # a job inside a job is a plain function
            return job.function(*args, **kwargs)
        arguments = flatten(job.name, job.signature, args, kwargs)
        if job.keys is None:
            job.keys = Keys(find(job.function, job.model, job.optimizer, self.names))
        if self.cluster.settings.pretend:
            return self._pretend(job, arguments, args, kwargs)
        if self.worker is not None:
            self.variables.refresh()
        key = job.keys.key(arguments, fresh(job.keys.state, self._stepped))
        compiled = job.plans.get(key)
        number = self._announce(job, arguments, compiled)
        if compiled is None:
            compiled = self._compile(job, arguments, number, spoken(arguments, key))
            job.plans[key] = compiled
        self._left.before(job.name, compiled.gradients)
        return self._issue(job, compiled, arguments, number)

    def _issue(self, job: JobLike, compiled: Compiled, arguments: Arguments, number: int) -> Any:
        worker = self.worker
        assert worker is not None
        inputs = {
            spec.name: tensor.to(worker.device)
            for spec, tensor in zip(arguments.specs, arguments.tensors, strict=True)
            if spec.name in compiled.inputs
        }
        scalars = {name: setting(optimizer.param_groups[g], key) for name, optimizer, g, key in compiled.scalars}
        scalars[SEED] = seeds.next(self._seed)
        call = worker.issue(compiled.number, inputs, scalars)
        with self._changed:
            while self._issued and self._issued[0][1].done:
                self._issued.popleft()
            self._issued.append((number, call))
            self._begun = number + 1
            go = number in self._gone
            if go:
                self._gone.discard(number)
            else:
                self._numbers[number] = call.number
            self._changed.notify_all()
        if go:
            worker.permit(call.number)
        compiled.calls += 1
        job.last = compiled
        for optimizer in compiled.optimizers:
            count_as_stepped(optimizer)
        handles = self.results.handles(number, call, compiled.plan.results)
        return tree.rebuild(compiled.shape, handles, getattr(job.function, "__globals__", {}))

    def _announce(self, job: JobLike, arguments: Arguments, compiled: Compiled | None) -> int:
        """Tell the other ranks of the call, and what must be equal on all of them; returns its number."""
        number = self.calls
        self.calls += 1
        text = ""
        if self.world > 1:
            writes = self.variables.writes if self.worker is not None else 0
            known = f"{arguments.spoken} [a new plan" if compiled is None else compiled.spoken
            text = f"{known}, {writes} writes of state"
            if seeds.seed is not None:
                text += f", seed {seeds.seed}"
            if job.keys is not None and job.keys.state.optimizers:
                text += f", {rates(job.keys.state)}"
            if compiled is None or compiled.calls % CHECK_CONTENTS == 0:
                text += f", contents {checksum(arguments.tensors):08x}"
            text += "]"
        digest = hashlib.sha256(f"{job.type} {text}".encode()).hexdigest()[:16]
        self.cluster.gate(number, digest, text)
        return number

    # -- compiling ---------------------------------------------------------------------------------

    def _order(self, job: JobLike, arguments: Arguments, fixed: dict[str, Any]) -> Order:
        state = find(job.function, job.model, job.optimizer, self.names)
        job.keys = Keys(state)
        train, hints, first = job.type == "train", hints_of(state), fresh(state, self._stepped)
        later, explain = job in self._compiled, self.cluster.settings.explain
        return Order(
            job.name, job.function, arguments, state, hints, train, job.micro_batches, job.goal, fixed, first, later,
            explain, self._target(), job.schedule,
        )  # fmt: skip

    def _target(self) -> Target:
        settings = self.cluster.settings
        return Target(settings.hardware, settings.measure, threads_of(settings.devices) if settings.pretend else 0)

    def _compile(self, job: JobLike, arguments: Arguments, number: int, text: str) -> Compiled:
        fixed = dict(self.variables.layouts) if self.worker is not None else {}
        order = self._order(job, arguments, fixed)
        state = order.state
        self._capturing = True
        try:
            mine = report(state, order.hints, contents=self.world > 1)
            made = make_everywhere(self.cluster, str(number), order, mine)
        finally:
            self._capturing = False
        self._compiled.add(job)
        if self.worker is None:
            self._seed = made.seed
            self._start(made)
        worker = self.worker
        assert worker is not None
        self._adopt(made, state, number)
        plan = made.plan.for_rank(self.rank) if self.rank == 0 else made.plan
        self.cluster.connect(plan.peers(self.rank))
        plan = unshare(plan, self.rank, self.cluster.near)
        plan_number = self._plans
        self._plans += 1
        worker.install(plan_number, plan)
        actors = [a for a in plan.actors if a.rank == self.rank]
        steps = job.type == "train"
        if steps:
            self._stepped.update(state.optimizers)
        return Compiled(
            text,
            plan_number,
            made.plan,
            made.shape,
            frozenset(o.name for a in actors for o in a.operands if isinstance(o, OfInput)),
            tuple(_scalars(actors, state)),
            tuple(state.optimizers.values()) if steps else (),
            made.gradients,
        )

    def _start(self, made: Made) -> None:
        """Make the worker: with the first plan it is known on which devices it runs."""
        kinds = {p.type for p in [v.placement for v in made.plan.variables] + [r.placement for r in made.plan.results]}
        device = torch.device("cuda", self.cluster.settings.local_rank) if kinds == {"cuda"} else torch.device("cpu")
        planes: dict[str, DataPlane] = {}
        if isinstance(self.cluster, Cluster):
            planes["gloo"] = GlooPlane(self.rank, self.cluster.store(), device)
        kept = trace.ITERATIONS if self.cluster.settings.trace else 0
        worker = Worker(self.rank, self.cluster, planes, device, trace=kept)
        self.results = Results(self.cluster, device)
        self.variables = Variables(
            self.cluster, self.names, worker.variables, device, worker.wait_all, lambda: self._begun, self._moved
        )
        self.worker = worker
        self.cluster.on_message(worker.deliver)
        self.cluster.on_line(worker.attach)
        worker.on_failure(self._worker_failed)
        if self.cluster.failure is not None:
            self._failed(self.cluster.failure)

    def _adopt(self, made: Made, state: State, number: int) -> None:
        """Cut this rank's parts of the new variables, from the master's values where they differ; leave stand-ins."""
        assert self.worker is not None
        variables = self.variables
        new = [v for v in made.plan.variables if v.name not in variables.layouts]
        if made.differing:
            variables.offer(number, {v.name: variables.start_of(v, state) for v in new if v.name in made.differing})
        self.worker.wait_all()
        for variable in sorted(new, key=lambda v: v.kind == "optimizer"):
            name = variable.name
            differs = self.rank in made.differing.get(name, ())
            value = variables.take(number, variable) if differs else variables.start_of(variable, state)
            mine = variables.part_of(variable, value)
            if mine is not None:
                self.worker.variables[name] = mine
            if name in made.lent:
                variables.lend(variable, state.held[name])
            elif name not in made.differing:
                variables.own(variable, state)
        if made.differing:
            self._warn(made)
            self.cluster.gather(f"values {number}", b"")  # every rank has taken what it needs
            for variable in sorted(new, key=lambda v: v.kind == "optimizer"):
                if variable.name in made.differing and variable.name not in made.lent:
                    variables.own(variable, state)
            variables.offer(number, {})
        for root in state.modules.values():
            variables.watch(root.modules())

    def _warn(self, made: Made) -> None:
        ranks = sorted({r for rs in made.differing.values() for r in rs})
        names = ", ".join(list(made.differing)[:3]) + (", …" if len(made.differing) > 3 else "")
        if self.rank in (0, *ranks):
            print(
                f"actorflow: {names} of job {made.plan.name!r} differed on rank{'s' * (len(ranks) > 1)} "
                f"{', '.join(map(str, ranks))}, which took the master's values; seed every rank alike, or load the "
                f"same checkpoint on all of them",
                file=sys.stderr,
                flush=True,
            )

    # -- actorflow plan ----------------------------------------------------------------------------

    def _pretend(self, job: JobLike, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile for ranks that do not exist; run the script's own eager step where another job's plan is wanted."""
        wanted = self.cluster.settings.plan_job
        order = self._order(job, arguments, dict(self._pretended))
        self._capturing = True
        try:
            plan, *_ = make_plan(order, self.world)
        finally:
            self._capturing = False
        if job.name == wanted or (not wanted and job.type == "train"):
            raise PlanReady(plan)
        self._compiled.add(job)
        self._pretended.update({v.name: v for v in plan.variables})
        with torch.set_grad_enabled(job.type == "train"):
            return job.function(*known_now(args), **known_now(kwargs))

    # -- other threads -----------------------------------------------------------------------------

    def _go(self, number: int) -> None:
        """Every rank has made this call."""
        with self._changed:
            mine = self._numbers.pop(number, None)
            if mine is None:
                self._gone.add(number)
        if mine is not None and self.worker is not None:
            self.worker.permit(mine)

    def _serve(self, key: str) -> Iterable[bytes]:
        """Answer another rank's pull."""
        what, _, rest = key.partition(" ")
        if what == "state":
            calls, writes, name = rest.split(" ", 2)
            self._await(int(calls), int(writes))
            yield self.variables.serve(name)
        elif what == "offer":
            at, name = rest.split(" ", 1)
            number = int(at)
            self._until(lambda: self.worker is not None and self.variables.offered >= number)
            yield self.variables.serve_offer(name)
        elif what == "result":
            number, index = map(int, rest.split())
            self._await(number + 1, 0)
            yield self.results.serve(number, index)
        elif what == "drop":
            self.results.forget(*map(int, rest.split()))
            yield b""
        else:
            raise CallError(f"{what!r} was asked for, which this rank does not serve")

    def _await(self, calls: int, writes: int) -> None:
        """Block until this rank is where the asking rank is: so many calls done and so many writes of state."""
        self._until(lambda: self._begun >= calls and (not writes or self.variables.writes >= writes))
        with self._changed:
            last = [call for number, call in self._issued if number < calls][-1:]
        for call in last:
            call.wait()

    def _until(self, there: Callable[[], bool]) -> None:
        """Block a serving thread until this rank is far enough; raises what ended the run."""
        with self._changed:
            self._changed.wait_for(lambda: there() or self.cluster.failed.is_set())
        if self.cluster.failure is not None:
            raise self.cluster.failure.error()

    def _moved(self) -> None:
        """State was written or offered between calls."""
        with self._changed:
            self._changed.notify_all()

    def _failed(self, failure: Failure) -> None:
        """The run is over, here or elsewhere."""
        with self._changed:
            self._changed.notify_all()
        if self.worker is not None:
            self.worker.fail(failure.error())

    def _worker_failed(self, error: BaseException) -> None:
        """An actor of this rank failed."""
        if self.cluster.explain(error) is error:  # else a lost peer is the cause, and is reported as such
            self.cluster.abort("raised", f"failed: {error}")

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for every call that was issued; raises what failed."""
        if self.worker is not None:
            self.worker.wait_all()
            self.results.close()
            if self.cluster.settings.trace:
                trace.write(self.cluster.settings.trace, self.rank, self.worker.observed())

    def explain(self) -> str:
        """What this rank's queues are at and what they wait for."""
        return "no job has been called yet" if self.worker is None else self.worker.explain()


def _scalars(actors: Iterable[Any], state: State) -> Iterator[tuple[str, torch.optim.Optimizer, int, str]]:
    for name in sorted({o.name for a in actors for o in a.operands if isinstance(o, OfScalar)} - {SEED}):
        optimizer, group, key = name.rsplit(".", 2)
        yield name, state.optimizers[optimizer], int(group), key


_session: Session | None = None


def current() -> Session:
    """This process's session; made with the first call of a job."""
    global _session
    if _session is None:
        _session = Session(clusters.current())
        if isinstance(_session.cluster, Alone) and not _session.cluster.settings.launcher:
            atexit.register(_finish_at_exit)
    return _session


def finish() -> None:
    """Wait for every call that this process issued; raises what failed.  The launcher's entry calls it at the end."""
    if _session is not None:
        _session.finish()


def _finish_at_exit() -> None:
    """Under plain ``python script.py``: a call that fails after the last line of the script must not go unnoticed."""
    if getattr(sys, "last_value", None) is not None:  # the script has failed already
        return
    try:
        finish()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)


def explain() -> str:
    """What every queue of this rank is at and what it waits for: the thing to look at when a run stands still."""
    return current().explain()
