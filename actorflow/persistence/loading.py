"""Load a checkpoint: every rank reads its own parts of the tensors, under whatever plan they will have."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from actorflow.control import cluster as clusters
from actorflow.control.cluster import Alone, Cluster
from actorflow.persistence.folders import FoundCheckpoint, checkpoints_in, open_checkpoint, plans_beside, step_name
from actorflow.persistence.foreign import open_foreign
from actorflow.persistence.objects import has_state, names_of_parameters, state_of, with_indices
from actorflow.persistence.random_states import set_random_states
from actorflow.persistence.saving import finish_saves, refuse_in_step
from actorflow.persistence.state_tree import decode
from actorflow.persistence.storage import Folder, ReadableFolder, open_folder
from actorflow.persistence.stored import StoredState
from actorflow.session.plan_store import KEPT
from actorflow_compiler.core.errors import StateError

__all__ = ["Loaded", "find_checkpoint", "load_checkpoint", "load_found", "read_checkpoint", "verified"]

SAID = 5  # names in a message


class Loaded(Mapping[str, Any]):
    """What was loaded: a mapping of the values that were saved beside objects, such as ``epoch=3``.

    Tensors among them are read, whole, when their value is asked for.
    """

    def __init__(self, path: str, step: int | None, values: Mapping[str, Callable[[], Any]]) -> None:
        self.path = path
        self.step = step  # that it was saved with; None: without
        self._values = values

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
    for name, value in objects.items():
        if not has_state(value) or not callable(getattr(value, "load_state_dict", None)):
            raise StateError(
                f"{name} is a {type(value).__qualname__}; an object with load_state_dict() was expected: plain values "
                f"are in what flow.checkpoint.load returns, {name!r} among them"
            )
    refuse_in_step("load")
    finish_saves()  # it may be what is to be loaded
    foreign = open_foreign(path, trusted) if step is None else None
    if foreign is not None:
        _load_states(foreign.path, foreign.states(objects), objects, strict, {})
        return Loaded(foreign.path, None, {})
    return load_found(find_checkpoint(open_folder(path), step), objects, with_random, verify, strict)


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[Loaded, dict[str, Any]]:
    """The newest checkpoint in a folder: as values, and as trees of tensors that are read when they are needed."""
    finish_saves()
    found = find_checkpoint(open_folder(path), None)
    manifest, state = found.manifest, found.state
    assert manifest is not None
    if problem := verified(found):
        raise StateError(problem)
    return _loaded(found, state, ()), {name: decode(one, state.tensor) for name, one in manifest.objects.items()}


def find_checkpoint(root: Folder, step: int | None) -> FoundCheckpoint:
    """The checkpoint of a step in a folder; without ``step`` the one that the folder is, or else the newest whole one.

    The master chooses, for all ranks.  Raises StateError, on every rank.
    """
    KEPT.read_from(plans_beside(root))
    run = clusters.current()
    problem, chosen = "", ""
    if run.rank == 0:
        try:
            chosen = _choose(root, step)
        except (StateError, OSError) as error:
            problem = str(error)
    said = None if run.rank else [json.dumps([problem, chosen]).encode()] * run.world
    problem, chosen = json.loads(run.scatter("flow.checkpoint.load", said))
    if problem:
        raise StateError(problem)
    found, mine = None, ""
    try:
        found = open_checkpoint(root.sub(chosen) if chosen else root)
        mine = found.problem
    except OSError as error:
        mine = f"{root.path!r} was found by rank 0; on rank {run.rank}: {type(error).__name__}: {error}"
    _agree(run, "flow.checkpoint.load", mine)
    assert found is not None
    return found


def _choose(root: Folder, step: int | None) -> str:
    """The name of the step's folder; empty if the folder itself is the checkpoint."""
    if step is None:
        try:
            found = open_checkpoint(root)
        except FileNotFoundError:
            pass
        else:
            if found.problem:
                raise StateError(f"{found.problem}{_older(root, None)}")
            return ""
    all_found = checkpoints_in(root)
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
        return _name(one.folder)
    for one in all_found:
        if one.manifest is not None:
            return _name(one.folder)
        print(f"actorflow: {one.problem}; it is ignored", file=sys.stderr, flush=True)
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
    found: FoundCheckpoint, objects: Mapping[str, Any], with_random: bool, verify: bool, strict: bool
) -> Loaded:
    """Load from a checkpoint; nothing is changed if it does not fit, on any rank."""
    manifest, state, run = found.manifest, found.state, clusters.current()
    assert manifest is not None
    if verify and (problem := verified(found)):
        raise StateError(problem)
    path, problem = found.folder.path, ""
    try:
        for file in state.files:
            file.open()  # what is read later may be removed by then, as older than those that a Keeper keeps
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
    objects = manifest.objects

    def decoded(name: str) -> Callable[[], Any]:
        return lambda: decode(objects[name], lambda tensor: state.values(tensor).whole())

    return Loaded(found.folder.path, manifest.step, {name: decoded(name) for name in objects if name not in but})


def verified(found: FoundCheckpoint) -> str:
    """Check all files of a checkpoint, each on one rank; what is wrong with one, or nothing, is told on every rank."""
    run, problem = clusters.current(), found.problem
    files = () if problem else found.state.files
    for file in files[run.rank :: run.world]:
        try:
            file.verify()
        except StateError as error:
            problem = f"{error}{_older_than(found)}"
            break
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
    for name, state in ready.items():
        value = objects[name]
        if isinstance(value, nn.Module):
            value.load_state_dict(state, strict=strict)
        else:
            value.load_state_dict(state)


def _fitted(name: str, state: Any, value: Any, names: Mapping[int, str], strict: bool) -> Any:
    """The state, in the form that the object's ``load_state_dict`` expects.  Raises StateError if it does not fit."""
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
