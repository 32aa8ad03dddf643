"""Load a checkpoint: every rank reads its own parts of the tensors, under whatever plan they will have."""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from actorflow.control import cluster as clusters
from actorflow.control.cluster import Alone, Cluster
from actorflow.persistence.folders import FoundCheckpoint, checkpoints_in, open_checkpoint, plans_beside, step_name
from actorflow.persistence.foreign import open_foreign
from actorflow.persistence.objects import (
    as_object,
    has_state,
    names_of_parameters,
    refuse_other_kind,
    state_of,
    with_indices,
)
from actorflow.persistence.random_states import set_random_states
from actorflow.persistence.saving import finish_saves, refuse_in_step
from actorflow.persistence.state_tree import decode, names_in
from actorflow.persistence.storage import Folder, ReadableFolder, open_folder
from actorflow.persistence.stored import SMALL, StoredState
from actorflow.session.optimizer_steps import read_before_steps
from actorflow.session.plan_store import KEPT
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ClusterError, StateError

__all__ = ["Loaded", "find_checkpoint", "load_checkpoint", "load_found", "read_checkpoint", "verified"]

SAID = 5  # names in a message


class Loaded(Mapping[str, Any]):
    """What was loaded: a mapping of the values that were saved beside objects, such as ``epoch=3``.

    Tensors among them are read, whole, when their value is asked for.
    """

    def __init__(
        self, path: str, step: int | None, values: Mapping[str, Callable[[], Any]], held: object = None
    ) -> None:
        self.path = path
        self.step = step  # that it was saved with; None: without
        self._values = values
        self._held = held  # so that the files of tensors among them stay

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise KeyError(f"{name!r} is no value in {self.path!r}; it has {sorted(self._values)}")
        return self._values[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<checkpoint {self.path!r}, step {self.step}, values {sorted(self._values)}>"


def load_checkpoint(
    path: str | os.PathLike[str], objects: Mapping[str, Any], step: int | None, with_random: bool, verify: bool,
    strict: bool, trusted: bool,
) -> Loaded:  # fmt: skip
    """See ``actorflow.checkpoint.load``."""
    objects = {name: as_object(value) for name, value in objects.items()}
    for name, value in objects.items():
        if not has_state(value) or not callable(getattr(value, "load_state_dict", None)):
            raise StateError(
                f"{name} is a {type(value).__qualname__}; an object with load_state_dict() was expected: plain values "
                f"are in what flow.checkpoint.load returns, {name!r} among them"
            )
    refuse_in_step("load")
    finish_saves()  # it may be what is to be loaded
    foreign = open_foreign(path, trusted)
    if foreign is not None and step is not None:
        raise StateError(
            f"{foreign.path!r} is of another maker, and has no steps; step {step} was asked for: leave it out"
        )
    if foreign is not None:
        _load_states(foreign.path, foreign.states(objects), objects, strict, {})
        return Loaded(foreign.path, None, {})
    found = find_checkpoint(open_folder(path), step)
    state = found.state
    if verify and (problem := verified(found, state)):
        raise StateError(problem)
    return load_found(found, state, objects, with_random, verify, strict)


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[Loaded, dict[str, Any]]:
    """The newest checkpoint in a folder: as values, and as trees of tensors that are read when they are needed."""
    finish_saves()
    found = find_checkpoint(open_folder(path), None)
    manifest, state = found.manifest, found.state
    assert manifest is not None
    if problem := verified(found, state):
        raise StateError(problem)
    return _loaded(found, state, ()), {name: decode(one, state.tensor) for name, one in manifest.objects.items()}


def find_checkpoint(root: Folder, step: int | None) -> FoundCheckpoint:
    """The checkpoint of a step in a folder; without ``step`` the one that the folder is, or else the newest whole one.

    The master chooses, for all ranks.  Raises StateError, on every rank.
    """
    KEPT.read_from(plans_beside(root))
    run = clusters.current()
    problem, chosen = "", ""
    found: FoundCheckpoint | None = None
    if run.rank == 0:
        try:
            chosen, found = _choose(root, step)
        except (StateError, OSError) as error:
            problem = str(error)
    said = None if run.rank else [json.dumps([problem, chosen]).encode()] * run.world
    problem, chosen = json.loads(run.scatter("flow.checkpoint.load", said))
    if problem:
        raise StateError(problem)
    mine = ""
    try:
        found = found or open_checkpoint(root.sub(chosen) if chosen else root)
        mine = found.problem
    except OSError as error:
        mine = f"{root.path!r} was found by rank 0; on rank {run.rank}: {type(error).__name__}: {error}"
    _agree(run, "flow.checkpoint.load", mine)
    assert found is not None
    return found


def _choose(root: Folder, step: int | None) -> tuple[str, FoundCheckpoint]:
    """A checkpoint, and the name of its folder, which is empty if it is ``root``.  Raises StateError and OSError."""
    own: FoundCheckpoint | None = None
    with suppress(FileNotFoundError):
        own = open_checkpoint(root)
    if own is not None and step in (None, own.step):
        if own.problem:
            raise StateError(f"{own.problem}{_older(root, step)}")
        return "", own
    all_found = checkpoints_in(root)
    if own is not None and not any(one.step == step for one in all_found):
        has = "was saved without a step" if own.step is None else f"is the checkpoint of step {own.step}"
        raise StateError(f"{root.path!r} {has}; step {step} was asked for: load it without step=, or name its folder")
    if not all_found:
        raise StateError(
            f"{root.path!r} holds no checkpoint: {_what_is_in(root)}; a folder that flow.checkpoint.save has written "
            f"was expected, or one of safetensors files, or a file of torch.save"
        )
    whole = [one for one in all_found if one.manifest is not None]
    if step is not None:
        one = next((one for one in all_found if one.step == step), None)
        if one is None:
            raise StateError(
                f"{root.path!r} has no checkpoint of step {step}; it has those of "
                f"{', '.join(str(found.step) for found in reversed(whole)) or 'no step'}"
            )
        if one.manifest is None:
            raise StateError(f"{one.problem}{_older(root, step)}")
        return _name(one.folder), one
    for one in all_found:
        if one.manifest is not None:
            return _name(one.folder), one
        say(f"{one.problem}; it is ignored")
    raise StateError(f"{root.path!r} holds no whole checkpoint: {all_found[0].problem}")


def _name(folder: ReadableFolder) -> str:
    return folder.path.rstrip("/").rpartition("/")[2]


def _what_is_in(root: Folder) -> str:
    there = [*root.folders(), *root.files()]
    return f"there are {', '.join(sorted(there)[:SAID])}" if there else "there is no such folder, or nothing in it"


def _older(root: Folder, step: int | None) -> str:
    """The end of a message: which checkpoint could be loaded in place of a damaged one."""
    whole = [one.step for one in checkpoints_in(root) if one.manifest is not None and one.step is not None]
    before = [one for one in whole if step is None or one < step]
    return f"; the next older checkpoint is that of step {before[0]}: load it with step={before[0]}" if before else ""


def load_found(
    found: FoundCheckpoint, state: StoredState, objects: Mapping[str, Any], with_random: bool, checked: bool,
    strict: bool,
) -> Loaded:  # fmt: skip
    """Load from a checkpoint, whose tensors are ``state``; nothing is changed if it does not fit, on any rank.

    ``checked``: what its files hold has been compared with their checksums.
    """
    manifest, run = found.manifest, clusters.current()
    assert manifest is not None
    path, problem = found.folder.path, ""
    try:
        state.open(checked)
    except StateError as error:
        problem = str(error)
    _agree(run, "flow.checkpoint.load: files", problem)
    said = {name: one for name, one in manifest.objects.items() if name in objects}

    missing = {name: _nearest(name, manifest.objects) for name in objects if name not in said}
    states = {name: decode(one, state.tensor) for name, one in said.items()}
    _load_states(path, states, objects, strict, missing)
    for file in state.files:
        file.forget()
    if with_random and manifest.random:
        of_ranks = manifest.random if len(manifest.random) > 1 else manifest.random * run.world
        set_random_states(of_ranks[run.rank] if run.rank < len(of_ranks) else of_ranks[0])
    return _loaded(found, state, objects)


def _loaded(found: FoundCheckpoint, state: StoredState, but: Container[str]) -> Loaded:
    """The values of a checkpoint, without those of these names."""
    manifest = found.manifest
    assert manifest is not None
    values = {name: said for name, said in manifest.objects.items() if name not in but}

    def decoded(said: Any) -> Callable[[], Any]:
        return lambda: decode(said, lambda tensor: state.values(tensor).whole())

    held = state.hold() if any(map(names_in, values.values())) else None
    return Loaded(found.folder.path, manifest.step, {name: decoded(said) for name, said in values.items()}, held)


def verified(found: FoundCheckpoint, state: StoredState | None) -> str:
    """Check all blocks of a checkpoint's files, each on one rank; what is wrong, or nothing, is told on every rank."""
    run, problem = clusters.current(), found.problem
    files = () if state is None else state.files
    blocks = sum(file.blocks for file in files)
    begin, end = blocks * run.rank // run.world, blocks * (run.rank + 1) // run.world
    try:
        for file in files:
            if begin < file.blocks and end > 0:
                file.verify(max(0, begin), min(end, file.blocks))
            begin, end = begin - file.blocks, end - file.blocks
    except StateError as error:
        problem = f"{error}{_older_than(found)}"
    return _told_by_any(run, "flow.checkpoint.load: checksums", problem)


def _older_than(found: FoundCheckpoint) -> str:
    if found.step is None or _name(found.folder) != step_name(found.step):
        return ""
    return _older(open_folder(found.folder.path.rstrip("/").rpartition("/")[0]), found.step)


def _told_by_any(run: Alone | Cluster, what: str, problem: str) -> str:
    """The problem of the first rank that has one, on every rank; empty if none has."""
    said = run.gather(what, problem.encode())
    first = None if said is None else next((one for one in said if one), b"")
    return run.scatter(what, None if first is None else [first] * run.world).decode()


def _agree(run: Alone | Cluster, what: str, problem: str) -> None:
    """Raise StateError, on every rank, if any has a problem."""
    if found := _told_by_any(run, what, problem):
        raise StateError(found)


def _load_states(
    path: str, states: Mapping[str, Any], objects: Mapping[str, Any], strict: bool, missing: Mapping[str, str]
) -> None:
    """Give each object its state, once all ranks know that all of them fit."""
    names = names_of_parameters(objects)
    problems = [f"{name} is not in the checkpoint{near}" for name, near in missing.items()]
    ready: dict[str, Any] = {}
    for name, state in states.items():
        try:
            ready[name] = _fitted(name, state, objects[name], names, strict)
        except StateError as error:
            problems.append(str(error))
    _agree(
        clusters.current(), "flow.checkpoint.load: does it fit",
        f"the checkpoint {path!r} does not fit: {'; '.join(problems)}; nothing was loaded" if problems else "",
    )  # fmt: skip
    modules = {name for name in ready if isinstance(objects[name], nn.Module)}
    optimizers = {name for name in ready if isinstance(objects[name], Optimizer)}
    undone = list[Callable[[], object]]()
    for some in (ready.keys() - modules - optimizers, optimizers):
        refused = ""
        for name in sorted(some):
            undone.append(_undo(objects[name]))
            if refused := _refusal(name, objects[name], ready[name]):
                break
        # before all have taken it, no rank may go on to what ranks do together
        if refused := _told_by_any(clusters.current(), "flow.checkpoint.load: do they take it", refused):
            for undo in reversed(undone):
                undo()
            raise StateError(f"the checkpoint {path!r} does not fit: {refused}; nothing was loaded")
    for name in sorted(modules, key=list(ready).index):  # last, as they take what has their names and shapes
        if refused := _refusal(name, objects[name], ready[name], strict=strict):
            raise StateError(f"the checkpoint {path!r} does not fit: {refused}; other objects were loaded before")
    read_before_steps()


def _refusal(name: str, value: Any, state: Any, **options: Any) -> str:
    """Give an object its state; why it does not take it, or nothing."""
    try:
        value.load_state_dict(state, **options)
    except ClusterError:
        raise
    except Exception as error:
        return f"{name} is a {type(value).__qualname__}, which refused its state: {type(error).__name__}: {error}"
    return ""


def _undo(value: Any) -> Callable[[], object]:
    """What gives an object the state back that it has now; large tensors are not copied for that."""
    if isinstance(value, Optimizer):
        state = {"state": defaultdict(dict, value.state), "param_groups": [dict(group) for group in value.param_groups]}
        return lambda: value.__setstate__(state)
    try:
        now = value.state_dict()
        large = [t for t in pytree.tree_leaves(now) if isinstance(t, Tensor) and t.numel() > SMALL]
        before = copy.deepcopy(now, {id(tensor): tensor for tensor in large})
    except Exception:  # an object that cannot say what it has, yet
        return lambda: None

    def undo() -> None:
        with suppress(Exception):  # it is told what was wrong in the first place
            value.load_state_dict(before)

    return undo


def _fitted(name: str, state: Any, value: Any, names: Mapping[int, str], strict: bool) -> Any:
    """The state, in the form that the object's ``load_state_dict`` expects.  Raises StateError if it does not fit."""
    refuse_other_kind(name, state, value)
    if isinstance(value, Optimizer):
        return with_indices(state, name, value, names)
    if not isinstance(value, nn.Module) or not isinstance(state, Mapping):
        return state
    own: dict[str, Any] = dict(state_of(name, value, names))
    state = _with_tied(value, own, state)
    absent, extra = [key for key in own if key not in state], [key for key in state if key not in own]
    if strict and (absent or extra):
        said = [f"{name} has {key}, which the checkpoint has not{_nearest(key, extra)}" for key in absent[:SAID]]
        said += [f"the checkpoint has {name}.{key}, which the module has not" for key in extra[:SAID]]
        more = max(0, len(absent) - SAID) + max(0, len(extra) - SAID)
        raise StateError("; ".join(said) + (f"; and {more} more" if more else ""))
    for key, tensor in own.items():
        if isinstance(tensor, Tensor) and isinstance(state.get(key), Tensor) and tensor.shape != state[key].shape:
            raise StateError(
                f"{name}.{key} has shape {list(tensor.shape)}; in the checkpoint it has {list(state[key].shape)}"
            )
    return state


def _with_tied(module: nn.Module, own: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state with all names of tensors that modules share; some formats keep one of them."""
    by_id: dict[int, list[str]] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for key, tensor in tensors:
        if key in own:
            by_id.setdefault(id(tensor), []).append(key)
    tied = {
        key: state[there]
        for keys in by_id.values()
        if (there := next((key for key in keys if key in state), None)) is not None
        for key in keys
        if key not in state
    }
    if not tied:
        return state
    merged = type(state)(state) if isinstance(state, dict) else dict(state)
    merged.update(tied)
    return merged


def _nearest(name: str, others: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(others), n=1)
    return f" (the nearest is {near[0]})" if near else ""
