"""Draw a random training script from a seed, and report what it does as a job that it does not do in plain PyTorch.

    python tests/random_scripts.py 17             # what becomes of seed 17, and its script
    python tests/random_scripts.py 17 --shrink    # the same with the fewest parts that end alike
    python tests/random_scripts.py 0 --until 100  # all of them, with a line for each that is not the same
    actorflow run tests/random_scripts.py --devices 2 -- 0 --until 100 --layout "ZeRO 3"

With ``--into FOLDER`` every rank writes a line before and a line after each script, and ends behind one that has
failed: ``random_script_runs`` starts it again with the next one.

A script is some parts of ``script_parts`` around one model; they change what the step can reach between calls and in
it.  It is equal where each call returns, and leaves in everything that the script can reach, what it does eagerly.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import inspect
import json
import linecache
import math
import os
import random
import re
import signal
import sys
import tempfile
import textwrap
import traceback
import types
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import actorflow as flow
from actorflow_compiler.core.errors import ActorflowError
from recipes.layouts import LAYOUTS
from script_parts import PARTS, Part

EACH = "each"
SEVERAL = [name for name, layout in LAYOUTS.items() if layout.devices == 2]
CALLS, WIDTH, CLASSES, BATCH = 5, 6, 3, 4
BOUND, CHAOS, NOISE = 1e-9, 1e-8, 1e-11
_OF_THE_STEP = re.compile(r"\b(loss|out)\b")  # what a step that only updates does not have
PATIENCE = 180  # seconds that one script may take, which only a hang does, also on a busy machine
INSIDE = re.compile(  # what torch says to those who make it, and not to those who use it
    r"data-dependent expression|tlparse|TORCH_LOGS|INTERNAL ASSERT|fake_tensor|FakeTensor|StopIteration|proxy_tensor|"
    r"KeyError|AttributeError: 'NoneType'|AssertionError|RecursionError"
)

HEAD = """
import argparse
import array
import collections
import contextlib
import contextvars
import copy
import dataclasses
import datetime
import enum
import fractions
import functools
import itertools
import math
import operator
import os
import pathlib
import random
import threading
import time
import types
import weakref
from types import SimpleNamespace

import helpers
import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import nn

WIDTH, CLASSES = 6, 3
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


@dataclasses.dataclass
class Returned:
    loss: object
    out: object


class Thing:
    def __init__(self, a):
        self.a = a

    def scaled(self, t):
        return t * self.a


class Shelf:
    pass


def loss_of(returned):
    # the first tensor of what a call returns
    if isinstance(returned, torch.Tensor):
        return returned
    if isinstance(returned, Returned):
        return returned.loss
    return loss_of(next(iter(returned.values())) if isinstance(returned, dict) else returned[0])


def halve_first(optimizer, args, kwargs):
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(0.5)


def shrink_gradients(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


"""
HELPERS = """
import torch

CONFIG = {"deep": {"gain": 0.5}}


def scaled(t, by):
    return t * by


def act(t):
    return torch.tanh(t)
"""

OTHER = """
loss = model(x).pow(2).mean()
loss.backward()
optimizer.step()
optimizer.zero_grad()
return loss
""".lstrip()

OPTIMIZERS = (
    "torch.optim.SGD({p}, lr=0.1)",
    "torch.optim.SGD({p}, lr=0.05, momentum=0.9)",
    "torch.optim.SGD({p}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "torch.optim.SGD({p}, lr=0.05, momentum=0.9, dampening=0.1)",
    "torch.optim.SGD({p}, lr=0.05, momentum=0.9, foreach=True)",
    "torch.optim.Adam({p}, lr=0.01, eps=1e-4)",
    "torch.optim.Adam({p}, lr=0.01, eps=1e-4, amsgrad=True)",
    "torch.optim.AdamW({p}, lr=0.01, eps=1e-4, foreach=True)",
    "torch.optim.AdamW({p}, lr=0.01, eps=1e-4)",
    "torch.optim.RMSprop({p}, lr=0.01, eps=1e-3)",
    "torch.optim.Adagrad({p}, lr=0.05, eps=1e-3)",
    "torch.optim.NAdam({p}, lr=0.01, eps=1e-4)",
)
RETURNS = (
    "loss", "loss, out.detach()", '{"loss": loss, "out": [out, None, 3]}', "loss.detach()", "Returned(loss, out)",
    'dict(metrics=dict(loss=loss), name="x")', "[loss, out.argmax(1)]",
)  # fmt: skip
KINDS = (
    "read", "read", "read", "tensors", "within", "within", "layers", "layers", "steps", "steps", "arguments", "loops",
    "loops", "rare", "rare",
)  # fmt: skip
FRAMES = (  # where the optimizer steps, and what else the loop calls
    "plain", "plain", "plain", "plain", "plain", "outside", "split", "turns", "shorter",
)  # fmt: skip
FORWARD, STEP = ("forward", "block"), ("step", "helper")
HOMES = {  # where variables live, by where they are used → as they are written there, in the step, and outside
    "forward": ("self", "global", "namespace", "table", "class", "inner", "module"),
    "block": ("self", "global", "namespace", "table", "class", "inner", "module"),
    "helper": ("global", "namespace", "table", "class", "module"),
    "step": ("global", "namespace", "table", "class", "model", "module"),
}
SHARED = {"global": "{x}", "namespace": "state.{x}", "table": 'table["{x}"]', "class": "Shelf.{x}",
          "module": "helpers.{x}"}  # fmt: skip


def _written(home: str, context: str, place: str, name: str) -> str:
    """A variable as code of a context (``use``, ``step``, ``outside``, ``loop``) writes it."""
    path = "model" if place == "forward" else "model.block"
    if home in SHARED:
        return SHARED[home].format(x=name)
    if home == "trainer":
        return f"{'trainer' if context in ('outside', 'loop') else 'self'}.{name}"
    if home == "model":
        return f"model.{name}"
    owner = "self" if context == "use" else path
    return f"{owner}.{name}" if home == "self" else f"{owner}.cfg.{name}"


class _Writer:
    """Puts a script together."""

    def __init__(self, seed: int, keep: Sequence[int] | None) -> None:
        rng = random.Random(f"{seed} script")
        self.style = rng.choice(["module", "module", "main", "method"])
        self.zero = rng.choice(["end", "end", "end", "begin", "begin", "zeros", "model", "never", "accumulate"])
        self.optimizer = rng.choice(OPTIMIZERS)
        self.kind = rng.choice(["one", "one", "one", "two", "groups", "hand"])
        self.returned = rng.choice(RETURNS if self.style != "main" else [r for r in RETURNS if "Returned" not in r])
        self.evaluates = rng.random() < 0.25  # in a job that may change nothing
        self.pieces = rng.choice([1, 1, 1, 2])
        self.each = rng.random() < 0.6  # whether all state is looked at after each call
        self.frame = random.Random(f"{seed} frame").choice(FRAMES)
        self.apart = self.frame in ("outside", "split")  # the optimizer does not step where gradients are computed
        count = rng.choice([1, 2, 2, 3, 3, 4, 5])
        self.titles: list[str] = []
        self.top: list[str] = []
        self.init: dict[str, list[str]] = {"forward": [], "block": [], "trainer": []}
        self.use: dict[str, list[str]] = {"forward": [], "block": [], "step": []}
        self.step: dict[str, list[str]] = {"loss": [], "grad": [], "post": []}
        self.made: list[str] = []  # behind the model
        self.between: list[str] = []
        self.after: list[str] = []
        self.arguments: list[tuple[str, str]] = []  # names and values of those that the step has besides
        self.globals: set[str] = set()
        self.refused = False
        for n in range(count):
            if keep is None or n in keep:
                self._add(random.Random(f"{seed} part {n}"), n)

    def _add(self, rng: random.Random, n: int) -> None:
        kind = rng.choice(KINDS)
        part: Part = rng.choice(PARTS[kind])
        while (
            (part.refused and rng.random() < 0.7)
            or ("whole batches" in part.title and self.pieces > 1)
            or (self.evaluates and kind == "within")
            or (self.evaluates and "(changes state)" in part.title)
            or (self.apart and any(_OF_THE_STEP.search(part.sections.get(name, "")) for name in ("grad", "post")))
        ):
            kind = "read" if self.evaluates and kind == "within" else kind
            part = rng.choice(PARTS[kind])
        place = rng.choice(FORWARD if "init" in part.sections else [*FORWARD, *STEP])
        if "use" not in part.sections or "arg" in part.sections:
            place = "step"
        homes = HOMES[place] + (("trainer",) if place == "step" and self.style == "method" else ())
        home = rng.choice(homes)
        self.titles.append(f"{part.title} [{place}, {home}]")
        self.refused |= part.refused
        low, high = round(rng.uniform(0.3, 0.9), 2), round(rng.uniform(0.9, 1.3), 2)
        new = rng.choice([str(high), f"({low} if i % 2 else {high})", f"({low} + 0.1 * i)"])
        if home == "global":
            self.globals |= {f"{x}{n}" for x in re.findall(r"\$(\w+)", "".join(part.sections.values()))}

        def filled(code: str, context: str) -> str:
            code = re.sub(r"\$(\w+)", lambda m: _written(home, context, place, f"{m[1]}{n}"), code)
            if context != "use":
                path = "model" if place == "forward" else "model.block"
                code = re.sub(r"\bself(?=\.\w+%n)|(?<=setattr\()self\b", path, code)
                if context == "loop":
                    code = re.sub(r"\bself(?=\.)|(?<=hasattr\()self\b", path, code)
            for token, text in (("%n", str(n)), ("%f", str(low)), ("%v", new)):
                code = code.replace(token, text)
            return code

        for section, code in part.sections.items():
            if section == "top":
                self.top.append(filled(code, "outside"))
            elif section == "init":
                self.init[place].append(filled(code, "use"))
            elif section == "make":
                if home in SHARED:
                    self.top.append(filled(code, "outside"))
                elif home == "model":
                    self.made.append(filled(code, "outside"))
                elif home == "trainer":
                    self.init["trainer"].append(filled(code, "use"))
                else:
                    self.init[place].append(filled(code, "use"))
            elif section == "use" and place == "helper":
                code = filled(code, "use")
                self.top.append(f"def helper{n}(h):\n{_in(self._declared(code) + code + 'return h')}\n")
                self.use["step"].append(f"h = helper{n}(h)\n")
            elif section == "use":
                self.use[place].append(filled(code, "use"))
            elif section in ("loss", "grad", "post"):
                outside = self.frame == "outside" and section != "loss"
                self.step[section].append(filled(code, "outside" if outside else "step"))
            elif section == "arg":
                self.arguments += [tuple(line.split(": ", 1)) for line in filled(code, "outside").splitlines()]
            elif section == "after":
                self.after.append(filled(code, "loop"))
            else:
                when = rng.choice([f"if i == {rng.randint(1, 3)}:", f"if i in ({rng.randint(1, 3)}, 4):", "if i:"])
                if section == "always":
                    self.between.append(filled(code, "loop"))
                    continue
                when = "if i:" if section == "every" else when if "%v" in code else when.replace("if i:", "if i == 2:")
                self.between.append(f"{when}\n{_in(filled(code, 'loop'))}")

    def _declared(self, code: str) -> str:
        """The statement by which a function may set names that are not its own."""
        stores = {
            node.id
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        }
        named = sorted(stores & self.globals)
        return f"{'nonlocal' if self.style == 'main' else 'global'} {', '.join(named)}\n" if named else ""

    def text(self) -> str:
        """The script."""
        parts = ["settings = SimpleNamespace(last=True)\nstate, table = SimpleNamespace(), {}\n", *self.top]
        for name, place in (("Block", "block"), ("Model", "forward")):
            uses = "".join(self.use[place])
            init = "self.cfg = SimpleNamespace()\n"
            if name == "Model":
                init += (
                    "self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)\nself.block = Block()\n"
                )
                uses = f"h = self.first(h).tanh()\n{uses}h = self.block(h)\nreturn self.head(h)\n"
            else:
                uses += "return h\n"
            init = f"super().__init__()\n{init}{''.join(self.init[place])}"
            methods = f"def __init__(self):\n{_in(init)}\n\ndef forward(self, h):\n{_in(self._declared(uses) + uses)}"
            parts.append(f"class {name}(nn.Module):\n{_in(methods)}\n")
        parts.append("model = Model()\n" + "".join(self.made) + self._optimizers() + "ready(model)\n")
        body, end = self._body(), self._end()
        arguments = ", ".join(["x", "y", *(name for name, _ in self.arguments)])
        given = ", ".join(["x", "y", *(f"{name}={value}" for name, value in self.arguments)])
        pieces = "job" if self.pieces == 1 else f"job(micro_batches={self.pieces})"
        if self.style == "method":
            init = "self.model, self.optimizer = model, optimizer\n" + "".join(self.init["trainer"])
            steps = "model, optimizer = self.model, self.optimizer\n" + body
            methods = f"def __init__(self):\n{_in(init)}\n\n"
            methods += f"@{pieces}\ndef step(self, {arguments}):\n{_in(self._declared(steps) + steps)}"
            if self.frame == "split":
                steps = "model, optimizer = self.model, self.optimizer\n" + end
                methods += f"\n@job\ndef update(self):\n{_in(self._declared(steps) + steps)}"
            parts.append(f"class Trainer:\n{_in(methods)}\n\ntrainer = Trainer()\n")
        else:
            parts.append(f"@{pieces}\ndef step({arguments}):\n{_in(self._declared(body) + body)}\n")
            if self.frame == "split":
                parts.append(f"@job\ndef update():\n{_in(self._declared(end) + end)}\n")
        if self.frame == "turns":
            parts.append(f"@job\ndef other(x):\n{_in(OTHER)}\n")
        if self.evaluates:
            parts.append('@job(type="predict")\ndef evaluate(x):\n    return model(x)\n')
        rows = "BATCH if i < CALLS - 1 else BATCH // 2" if self.frame == "shorter" else "BATCH"
        loop = f"rows = {rows}\nx = torch.randn(rows, WIDTH, generator=data)\n"
        loop += "y = torch.randint(CLASSES, (rows,), generator=data)\n"
        if self.zero == "accumulate":
            loop += "settings.last = i % 2 == 1\n"
        loop += "".join(self.between)
        if self.style == "method":
            loop += f"trainer.model, trainer.optimizer = model, optimizer\nreturned = trainer.step({given})\n"
        else:
            loop += f"returned = step({given})\n"
        if self.frame == "outside":
            loop += end
        elif self.frame == "split":
            loop += "trainer.update()\n" if self.style == "method" else "update()\n"
        elif self.frame == "turns":
            loop += "if i % 2:\n    other(x)\n"
        loop += "".join(self.after)
        if self.evaluates:
            loop += "was = [m.training for m in model.modules()]\nmodel.eval()\n"
            loop += "if i % 2:\n    returned = returned, evaluate(x)\n"
            loop += "for m, one in zip(model.modules(), was):\n    m.training = one\n"
        loop += f"watch(i, returned, {'locals' if self.style == 'main' else 'globals'}())\n"
        parts.append(f"data = torch.Generator().manual_seed(1)\nfor i in range(CALLS):\n{_in(loop)}")
        whole = "\n\n".join(parts)
        return HEAD + (f"def main():\n{_in(whole)}\n\n\nmain()\n" if self.style == "main" else whole)

    def _optimizers(self) -> str:
        if self.kind == "two":
            others = "[p for n, p in model.named_parameters() if not n.startswith('head')]"
            return (
                f"optimizer = {self.optimizer.format(p=others)}\n"
                "second = torch.optim.SGD(model.head.parameters(), lr=0.1)\n"
            )
        if self.kind == "groups":
            groups = (
                "[{'params': [p for p in model.parameters() if p.dim() < 2], 'weight_decay': 0.0}, "
                "{'params': [p for p in model.parameters() if p.dim() >= 2], 'lr': 0.02}]"
            )
            return f"optimizer = {self.optimizer.format(p=groups)}\n"
        return f"optimizer = {self.optimizer.format(p='model.parameters()')}\n"

    def _body(self) -> str:
        code = "h = x\n" + "".join(self.use["step"])
        if self.zero == "begin":
            code += "optimizer.zero_grad()\n" + ("second.zero_grad()\n" if self.kind == "two" else "")
        code += "out = model(h)\nloss = F.cross_entropy(out, y)\n" + "".join(self.step["loss"])
        code += "loss.backward()\n"
        if not self.apart:
            code += self._end()
        return code + f"return {self.returned}\n"

    def _end(self) -> str:
        """What is done with gradients."""
        end = "".join(self.step["grad"])
        if self.kind == "hand":
            end += (
                "with torch.no_grad():\n    for p in model.parameters():\n        if p.grad is not None:\n"
                "            p -= optimizer.param_groups[0]['lr'] * p.grad\n"
            )
        else:
            end += "optimizer.step()\n" + ("second.step()\n" if self.kind == "two" else "")
        end += "".join(self.step["post"])
        end += {
            "end": "optimizer.zero_grad()\n", "zeros": "optimizer.zero_grad(set_to_none=False)\n", "begin": "",
            "model": "model.zero_grad()\n", "never": "", "accumulate": "optimizer.zero_grad()\n",
        }[self.zero]  # fmt: skip
        if self.kind == "two" and self.zero in ("end", "zeros", "accumulate"):
            end += "second.zero_grad()\n"
        return f"if settings.last:\n{_in(end)}" if self.zero == "accumulate" else end


def _in(code: str) -> str:
    return textwrap.indent(code, "    ")


@dataclass(frozen=True)
class Drawn:
    """What a seed stands for."""

    text: str
    titles: tuple[str, ...]
    refused: bool  # whether a refusal is what the documentation says
    each: bool
    pieces: int
    whole: bool  # whether batches may not be cut in pieces


def draw(seed: int, keep: Sequence[int] | None = None) -> Drawn:
    """The script of a seed; ``keep``: with these parts only."""
    writer = _Writer(seed, keep)
    whole = any("whole batches" in title for title in writer.titles)
    return Drawn(writer.text(), (*writer.titles, writer.frame), writer.refused, writer.each, writer.pieces, whole)


# ---- everything that a script can reach

SKIPPED = (
    "watch", "ready", "job", "trainer_job", "returned", "was", "x", "y", "values", "rows", "data", "i", "helpers_file",
)  # fmt: skip
INTERNAL = (frozenset(vars(nn.Module())) - {"training"}) | {"_flat_weight_refs", "_flat_weights"}
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, slice, range)
LOST = "is not to be had"


class _Walk:
    """Writes down values by where they are."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: dict[str, Any] = {}
        self.seen: dict[int, tuple[str, Any]] = {}

    def put(self, path: str, value: Any) -> None:
        """Write down a value and all that it holds."""
        if isinstance(value, flow.Job):
            value = value.function
        if isinstance(value, types.FunctionType):
            value = getattr(value, "of_watch", value)
        if isinstance(value, float | np.floating):
            self.found[path] = torch.tensor(float(value))
            return
        if value is None or isinstance(value, PLAIN):
            self.found[path] = repr(value)
            return
        if id(value) in self.seen:
            self.found[path] = f"the same as {self.seen[id(value)][0]}"
            return
        self.seen[id(value)] = path, value
        if isinstance(value, Tensor):
            if isinstance(value, FakeTensor):
                self.found[path] = "a tensor without values"
                return
            self.found[path] = value.detach().clone()
            if isinstance(value, nn.Parameter) or (value.is_leaf and value.requires_grad):
                self.found[f"{path} requires_grad"] = str(value.requires_grad)
                try:
                    grad = value.grad
                    self.found[f"{path}.grad"] = "None" if grad is None else grad.detach().clone()
                except ActorflowError:
                    self.found[f"{path}.grad"] = LOST
        elif isinstance(value, np.ndarray):
            numbers = value.dtype.kind in "biuf"
            self.found[path] = torch.from_numpy(value.copy()) if numbers else f"{value.dtype} {value.tolist()}"
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizer(path, value)
        elif isinstance(value, weakref.WeakKeyDictionary):  # a cache of functools'
            self.found[path] = "cache"
        elif isinstance(value, Mapping):
            self.found[path] = f"{type(value).__name__} {[*map(_anywhere, value)]}"
            for key, item in value.items():
                self.put(f"{path}[{_anywhere(key)}]", item)
        elif isinstance(value, list | tuple | deque):
            self.found[path] = f"{type(value).__name__} of {len(value)}"
            for at, item in enumerate(value):
                self.put(f"{path}[{at}]", item)
        elif isinstance(value, set | frozenset):
            self.found[path] = str(sorted(map(_anywhere, value)))
        elif isinstance(value, types.FunctionType):
            self.function(path, value)
        elif isinstance(value, types.MethodType):
            self.put(f"{path}.__func__", value.__func__)
            self.put(f"{path}.__self__", value.__self__)
        elif isinstance(value, functools.partial):
            self.put(f"{path}.args", (value.func, value.args, value.keywords))
        elif isinstance(value, type):
            if value.__module__ == self.name:  # a Flag remembers all combinations that somebody has asked for
                own = {k: v for k, v in vars(value).items() if not k.startswith("__") and k != "_value2member_map_"}
                self.attributes(path, own)
        elif isinstance(value, types.ModuleType):
            if value.__name__ == "helpers":
                self.attributes(path, {k: v for k, v in vars(value).items() if not k.startswith("__")})
        elif isinstance(value, nn.Module):
            self.found[path] = type(value).__qualname__
            for name in ("_parameters", "_buffers", "_modules"):
                self.attributes(path, getattr(value, name))
            self.attributes(path, {k: v for k, v in vars(value).items() if k not in INTERNAL})
        elif isinstance(value, weakref.ref):
            self.put(f"{path}()", value())
        elif type(value).__module__ == self.name or isinstance(value, types.SimpleNamespace):
            self.found[path] = type(value).__qualname__
            self.attributes(path, getattr(value, "__dict__", {}))
            self.attributes(path, {n: getattr(value, n) for n in getattr(type(value), "__slots__", ())})
        elif type(value).__module__ in ("array", "builtins", "argparse", "fractions", "itertools"):
            text = repr(value)
            self.found[path] = type(value).__name__ if " at 0x" in text else text

    def attributes(self, path: str, values: Mapping[str, Any]) -> None:
        """Write down what something has by name."""
        for name, value in sorted(values.items(), key=lambda pair: pair[0]):
            self.put(f"{path}.{name}" if path else name, value)

    def function(self, path: str, value: types.FunctionType) -> None:
        """Write down what a function holds."""
        if value.__module__ not in (self.name, "helpers"):
            return
        self.found[path] = value.__qualname__
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):
                self.put(f"{path} cell {name}", cell.cell_contents)
        self.put(f"{path} defaults", (value.__defaults__, value.__kwdefaults__))
        self.attributes(path, {k: v for k, v in vars(value).items() if k != "__wrapped__"})

    def optimizer(self, path: str, value: torch.optim.Optimizer) -> None:
        """Write down an optimizer's groups and state."""
        self.found[path] = type(value).__name__
        for g, group in enumerate(value.param_groups):
            self.attributes(f"{path}.group{g}", {k: v for k, v in group.items() if k != "params"})
        for at, state in value.state_dict()["state"].items():
            for key, item in state.items():
                copied = item.detach().double().clone() if isinstance(item, Tensor) else repr(item)
                self.found[f"{path}.state[{at}].{key}"] = copied


def _anywhere(value: Any) -> str:
    """A value as text that does not tell where in memory it lies, nor what a tensor is."""
    return "a tensor" if isinstance(value, Tensor) else re.sub(" at 0x[0-9a-f]+", "", repr(value))


def run(drawn: Drawn, folder: str, decorate: Callable[..., Any], hints: Callable[[nn.Module], None], noise: int = 0,
        taken: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:  # fmt: skip
    """Run a script; what calls return, and what it can reach after each of them, or after the last one only."""
    taken = [] if taken is None else taken
    name = "random_script"
    helpers = types.ModuleType("helpers")
    helpers.__file__ = f"{folder}/helpers.py"
    module = types.ModuleType(name)
    module.__file__ = f"{folder}/script.py"
    for made, text in ((helpers, HELPERS), (module, drawn.text)):
        Path(str(made.__file__)).write_text(text)
        sys.modules[made.__name__] = made
    linecache.clearcache()

    def watch(i: int, returned: Any, scope: Mapping[str, Any]) -> None:
        walk = _Walk(name)
        walk.put("returned", returned)
        if drawn.each or i == CALLS - 1:
            last = {k: v for k, v in scope.items() if not k.startswith("__") and k not in SKIPPED}
            walk.attributes("", last)
            walk.found["default dtype"] = str(torch.get_default_dtype())
            walk.found["autocast"] = str(torch.is_autocast_enabled("cpu"))
        taken.append(walk.found)

    def ready(model: nn.Module) -> None:
        if noise:
            generator = torch.Generator().manual_seed(noise)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + NOISE * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        hints(model)

    vars(module).update(watch=watch, ready=ready, job=decorate, CALLS=CALLS, BATCH=BATCH)
    random.seed(0)
    np.random.seed(0)
    try:
        exec(compile(HELPERS, str(helpers.__file__), "exec"), vars(helpers))
        exec(compile(drawn.text, str(module.__file__), "exec"), vars(module))
    finally:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(True)
    return taken


def plainly(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """What a script's functions are decorated with where they are no jobs."""
    if function is None:
        return functools.partial(plainly, **options)
    if options.get("type") != "predict":
        return function

    @functools.wraps(function)
    def without(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    without.of_watch = function  # type: ignore[attr-defined]
    return without


def as_jobs(given: Mapping[str, Any], function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """What they are decorated with where they are."""
    if function is None:
        return functools.partial(as_jobs, given, **options)
    more = {} if options.get("type") == "predict" else dict(given)
    if not {*inspect.signature(function).parameters} - {"self"}:  # no batch
        more.pop("micro_batches", None)
    return flow.global_function(**{**more, **options})(function)


@dataclass(frozen=True)
class Outcome:
    """What became of a script."""

    kind: str  # same | different | refused | unclear | failed | hung | skipped
    text: str = ""


def apart(found: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs, with how much."""
    said = []
    for i, (a, b) in enumerate(zip(found, wanted, strict=False)):
        for path in (*b, *(p for p in a if p not in b)):
            one, other = a.get(path, "nothing"), b.get(path, "nothing")
            if isinstance(one, str) and one == LOST:
                continue
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                counts = path.endswith("['step']")  # of an optimizer's state, which fused kernels keep in float32
                if one.shape != other.shape or (one.dtype != other.dtype and not counts):
                    said.append(f"call {i}: {path}: {_kind(one)} is not {_kind(other)}")
                    continue
                if not one.numel():
                    continue
                one, other = one.double(), other.double()
                gap = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs()).max().item()
                if not gap <= BOUND * max(other.nan_to_num().abs().max().item(), 1e-3):
                    said.append(f"call {i}: {path}: {gap:.1e} apart")
            elif type(one) is not type(other) or one != other:
                said.append(f"call {i}: {path}: {_short(one)} is not {_short(other)}")
    return said


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else str(value)[:80]


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("it stands still")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(drawn: Drawn, layout: str = "one device") -> Outcome:
    """Run a script plainly and as jobs, and compare."""
    chosen = LAYOUTS[layout]

    def hint(model: nn.Module) -> None:
        chosen.hints({"model": model})

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted: list[dict[str, Any]] = []
        try:
            run(drawn, folder, plainly, lambda _: None, taken=wanted)
        except Exception as error:
            return Outcome("skipped", f"{type(error).__name__}: {error}")
        numbers = [v for found in wanted for v in found.values() if isinstance(v, Tensor)]
        if not all(math.isfinite(v.double().abs().max().item()) for v in numbers if v.numel()):
            return Outcome("skipped", "no finite values")
        found: list[dict[str, Any]] = []
        refused = ""
        options = {k: v for k, v in chosen.options.items() if k != "micro_batches" or not drawn.whole}
        try:
            with _in_time():
                run(drawn, folder, functools.partial(as_jobs, options), hint, taken=found)
        except ActorflowError as error:
            refused = f"{type(error).__name__}: {error}"
            frames = traceback.extract_tb(error.__traceback__)
            line = [f.line or "" for f in frames if f.filename.startswith(folder)][-1:]
            outside = line and not re.search(r"= (trainer\.)?step\(|evaluate\(x|watch\(", line[0])  # it names it itself
            said = re.search(r"(script|helpers)\.py:\d+|was called with", refused)
            clear = (outside or said) and not INSIDE.search(refused)
            ended = Outcome("refused" if clear else "unclear", f"{refused} {line}")
        except TimeoutError:
            return Outcome("hung", traceback.format_exc())
        except Exception:
            return Outcome("failed", traceback.format_exc())
        finally:
            gc.collect()
        wrong = apart(found, wanted)
        if wrong:
            shaken = run(drawn, folder, plainly, lambda _: None, noise=1)
            if any(re.search("e[-+]", s) for s in apart(shaken, wanted) if _gap(s) > CHAOS):
                return Outcome("skipped", "chaotic")
            return Outcome("different", "; ".join(wrong[:6]))
        return ended if refused else Outcome("same")


def _gap(said: str) -> float:
    number = re.search(r": ([\d.e+-]+|nan|inf) apart", said)
    return float(number[1]) if number else 0.0


def alike(text: str) -> str:
    """What is the same of two things that are said."""
    line = text.strip().splitlines()[-1 if "Traceback" in text else 0]
    return re.sub(r"\d+", "", re.sub(r"\S*/|call \d+: ", "", line))[:60]


def shrink(seed: int, layout: str) -> tuple[list[int], Outcome]:
    """The fewest parts that end alike."""
    first = outcome(draw(seed), layout)
    keep = [*range(len(draw(seed).titles))]
    for n in reversed(keep):
        fewer = [m for m in keep if m != n]
        again = outcome(draw(seed, fewer), layout)
        if again.kind == first.kind and (again.kind == "different" or alike(again.text) == alike(first.text)):
            keep, first = fewer, again
    return keep, first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--until", type=int, help="all seeds up to this one")
    parser.add_argument("--layout", default="one device", choices=[*LAYOUTS, EACH])
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--keep")
    parser.add_argument("--into", type=Path, help="a folder in which every rank writes what becomes of each script")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.until is not None:
        counts: Counter[str] = Counter()
        rank = flow.env.rank()
        file = None if asked.into is None else (asked.into / f"rank {rank}").open("a", buffering=1)
        for seed in range(asked.seed, asked.until):
            layout = SEVERAL[seed % len(SEVERAL)] if asked.layout == EACH else asked.layout
            drawn = draw(seed)
            line = {"seed": seed, "titles": drawn.titles, "layout": layout, "kind": "", "text": ""}
            print(json.dumps(line), file=file) if file is not None else None
            found = outcome(drawn, layout)
            kind = found.kind + (" as documented" if found.kind == "refused" and drawn.refused else "")
            counts[kind] += 1
            if file is not None:
                print(json.dumps(line | {"kind": kind, "text": found.text}), file=file)
                if found.kind in ("hung", "failed"):
                    os._exit(1)  # what comes now would be told of by a session that is over
            elif found.kind != "same" and rank == 0:
                lines = found.text.strip().splitlines()
                said = lines[-1] if found.kind == "failed" else " ".join(lines)[:600]
                print(seed, kind, "|", ", ".join(drawn.titles), "|", said, flush=True)
        print(dict(counts))
        return
    keep = None if asked.keep is None else [int(n) for n in asked.keep.split(",") if n]
    if asked.shrink:
        keep, _ = shrink(asked.seed, asked.layout)
        print("keep", keep)
    drawn = draw(asked.seed, keep)
    found = outcome(drawn, asked.layout)
    if flow.env.rank() == 0:
        print(drawn.text.removeprefix(HEAD))
        print(", ".join(drawn.titles))
        print(found.kind, found.text)


if __name__ == "__main__":
    main()
