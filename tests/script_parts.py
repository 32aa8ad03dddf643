"""Pieces of training scripts as people write them, a few lines each, of which ``random_scripts`` makes scripts.

A part is a title and sections of code.  ``use`` reads ``h``, of WIDTH features for each sample, and makes another one;
it goes into a module's forward, a function or the step.  ``loss``, ``grad`` (behind ``backward``) and ``post``
(behind the optimizer's step) go into the step; ``top`` before the model is made; ``init`` into the ``__init__`` of the
module whose forward has ``use``, and ``make`` to wherever the part's variables live, which are written ``$name``.
``between`` runs between two calls, once or before each, ``every`` before each but the first, ``always`` before each,
and ``after`` behind each, where ``returned`` is what it returned.  ``arg`` is a line for each argument more:
``name: value``, which may use ``i``.  ``%n`` is the part's number, ``%f`` some number, ``%v`` one that changes with
``i``, the number of the call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from script_parts_more import ARGUMENTS, LOOPS
from script_parts_rare import RARE

__all__ = ["PARTS", "Part"]

SECTIONS = ("top", "make", "init", "use", "loss", "grad", "post", "between", "every", "always", "after", "arg")


@dataclass(frozen=True)
class Part:
    """A part; ``refused`` is whether a job may refuse it: the documentation says so."""

    title: str
    refused: bool
    sections: Mapping[str, str]


READ = """
# a number
make: $a = %f
use: h = h * $a
between: $a = %v

# a number that decides
make: $m = 1
use: h = h.sin() if $m > 1 else h.cos()
between: $m = 1 + i % 2

# the name of a function
make: $mode = "tanh"
use: h = getattr(torch, $mode)(h)
between: $mode = "sin"

# a match
make: $mode = "tanh"
use:
    match $mode:
        case "tanh":
            h = h.tanh()
        case "soft" | "plus":
            h = F.softplus(h)
        case _:
            h = h * 2
between: $mode = ("soft", "none", "tanh")[i % 3]

# a table of lists
make: $t = {"a": 0.5, "b": [0.5, 2.0]}
use:
    for k in $t["b"]:
        h = h * k + $t["a"]
between: $t["b"][1] = %v

# a table of lists that gets longer
make: $t = {"a": 0.5, "b": [0.5, 2.0]}
use:
    for k in $t["b"]:
        h = h * k + $t["a"]
between: $t["b"].append(%f)

# a table that gets another key
make: $t = {"a": 0.5, "b": 0.7}
use: h = h * sum($t.values())
between: $t["c"] = %v

# the order of a table
make: $t = {"a": 0.5, "b": 0.7}
use:
    for k, v in $t.items():
        h = (h + v).sin() if k == "a" else h * v
between: $t["a"] = $t.pop("a")

# a table that is replaced
make: $t = {"a": 0.5}
use: h = h * $t.get("a", 1.0) + $t.get("z", 0.0)
between: $t = {"z": %v}

# a default dict
make: $t = collections.defaultdict(float, a=0.5)
use: h = h * (1 + $t["a"]) * (1 + ("b" in $t))
between: $t["b"] += %f

# an ordered dict
make: $t = collections.OrderedDict(a=0.5, b=2.0)
use:
    for v in $t.values():
        h = (h * v).sin()
between: $t.move_to_end("a")

# maps in a chain
make: $t = collections.ChainMap({}, {"a": 0.5})
use: h = h * $t["a"]
between: $t["a"] = %v

# a user's dictionary
make: $t = collections.UserDict(a=0.5)
use: h = h * $t["a"]
between: $t["a"] = %v

# a counter of collections
make: $t = collections.Counter("aab")
use: h = h * $t["a"]
between: $t.update("aa")

# a function that is kept
make: $fn = torch.tanh
use: h = $fn(h)
between: $fn = (torch.sin, torch.cos)[i % 2]

# a lambda that is kept
make: $fn = lambda t: t * 2
use: h = $fn(h)
between: $fn = lambda t: t * 3

# a partial
make: $fn = functools.partial(torch.mul, other=torch.full((), 0.5))
use: h = $fn(h)
between: $fn = functools.partial(torch.mul, other=torch.full((), 0.7))

# the keywords of a partial
top:
    def scaled%n(t, by=1.0, add=0.0):
        return t * by + add
make: $fn = functools.partial(scaled%n, by=%f)
use: h = $fn(h)
between: $fn.keywords["by"] = %v

# a list of functions
make: $fns = [torch.tanh, lambda t: t * 2]
use:
    for fn in $fns:
        h = fn(h)
between: $fns.insert(0, torch.sin)

# functions in a table
make: $fns = {"a": torch.tanh, "b": torch.sin}
make: $which = "a"
use: h = $fns[$which](h)
between: $which = "b" if i % 2 else "a"

# lambdas that remember
make: $fns = [lambda t, k=k: t * k for k in (0.5, 0.75)]
use: h = sum(fn(h) for fn in $fns)
between: $fns[0] = lambda t, k=%v: t * k

# a dataclass
top:
    @dataclasses.dataclass
    class Config%n:
        a: float = %f
        b: list = dataclasses.field(default_factory=lambda: [1.0, 0.5])
        @property
        def both(self):
            return self.a + sum(self.b)
make: $c = Config%n()
use: h = h * $c.both
between: $c.b[0] = %v

# a frozen dataclass
top:
    @dataclasses.dataclass(frozen=True)
    class Frozen%n:
        a: float = %f
        mode: str = "x"
make: $c = Frozen%n()
use: h = h * $c.a if $c.mode == "x" else h.sin()
between: $c = dataclasses.replace($c, a=%v)

# a frozen dataclass that is set all the same
top:
    @dataclasses.dataclass(frozen=True)
    class Frozen%n:
        a: float = %f
make: $c = Frozen%n()
use: h = h * $c.a
between: object.__setattr__($c, "a", %v)

# a named tuple
top:
    Pair%n = collections.namedtuple("Pair%n", "a b")
make: $c = Pair%n(%f, 2.0)
use: h = h * $c.a + $c.b
between: $c = $c._replace(b=%v)

# an enum
top:
    class Phase%n(enum.Enum):
        WARM = 1
        HOT = 2
make: $p = Phase%n.WARM
use: h = h * $p.value if $p is Phase%n.WARM else h.cos()
between: $p = Phase%n.HOT

# flags
top:
    class Flag%n(enum.Flag):
        A = enum.auto()
        B = enum.auto()
make: $p = Flag%n.A
use:
    if $p & Flag%n.B:
        h = h * 2
between: $p |= Flag%n.B

# a number of numpy
make: $a = np.float64(%f)
use: h = h * $a
between: $a = np.float64(%v)

# an array of numpy
make: $a = np.ones(WIDTH)
use: h = h * torch.from_numpy($a)
between: $a[2] = %v

# an array of numpy that is read
make: $a = np.linspace(0, 1, WIDTH)
use: h = h * float($a[1]) + $a.mean()
between: $a *= %f

# a property
top:
    class Owner%n:
        def __init__(self):
            self._x = %f
        @property
        def x(self):
            return self._x * 2
        @x.setter
        def x(self, value):
            self._x = value
make: $o = Owner%n()
use: h = h * $o.x
between: $o.x = %v

# defaults
top:
    def faded%n(t, by=%f, *, add=0.5):
        return t * by + add
use: h = faded%n(h)
between: faded%n.__defaults__ = (%v,)

# keyword defaults
top:
    def faded%n(t, by=%f, *, add=0.5):
        return t * by + add
use: h = faded%n(h)
between: faded%n.__kwdefaults__["add"] = %v

# keyword defaults that are replaced
top:
    def faded%n(t, by=%f, *, add=0.5):
        return t * by + add
use: h = faded%n(h)
between: faded%n.__kwdefaults__ = {"add": %v}

# a list as a default
top:
    def faded%n(t, by=[%f]):
        return t * by[0]
use: h = faded%n(h)
between: faded%n.__defaults__[0][0] = %v

# an attribute of a function
top:
    def faded%n(t):
        return t * faded%n.by
    faded%n.by = %f
use: h = faded%n(h)
between: faded%n.by = %v

# the code of a function
top:
    def one%n(t):
        return t * 0.5
    def two%n(t):
        return t.sin()
use: h = one%n(h)
between: one%n.__code__ = two%n.__code__

# an attribute of a class
top:
    class Base%n:
        a = %f
        def get(self):
            return self.a
    class Derived%n(Base%n):
        pass
make: $o = Derived%n()
use: h = h * $o.get()
between: Base%n.a = %v

# an attribute of a class that is overridden
top:
    class Base%n:
        a = %f
        def get(self):
            return self.a
    class Derived%n(Base%n):
        pass
make: $o = Derived%n()
use: h = h * $o.get()
between: Derived%n.a = %v

# an attribute of a class behind one of an object
top:
    class Base%n:
        a = %f
        def get(self):
            return self.a
make: $o = Base%n()
use: h = h * $o.get()
between: $o.a = %v

# a method that is replaced
top:
    class Base%n:
        def get(self, t):
            return t * 0.5
    class Derived%n(Base%n):
        def get(self, t):
            return super().get(t) + 1
make: $o = Derived%n()
use: h = $o.get(h)
between: Base%n.get = lambda self, t: t.sin()

# a method of one object
top:
    class Base%n:
        def get(self, t):
            return t * 0.5
make: $o = Base%n()
use: h = $o.get(h)
between: $o.get = lambda t: t.sin()

# another class of an object
top:
    class One%n:
        def get(self, t):
            return t * 0.5
    class Two%n:
        def get(self, t):
            return t.sin()
make: $o = One%n()
use: h = $o.get(h)
between: $o.__class__ = Two%n

# attributes that are looked up
top:
    class Open%n:
        def __init__(self):
            self.inner = {"a": %f}
        def __getattr__(self, name):
            try:
                return self.__dict__["inner"][name]
            except KeyError:
                raise AttributeError(name) from None
make: $o = Open%n()
use: h = h * $o.a
between: $o.inner["a"] = %v

# a dictionary with attributes
top:
    class Dots%n(dict):
        def __getattr__(self, name):
            return self[name]
        def __setattr__(self, name, value):
            self[name] = value
make: $o = Dots%n(a=%f)
use: h = h * $o.a
between: $o.a = %v

# an operator of a class
top:
    class Scale%n:
        def __init__(self, by):
            self.by = by
        def __mul__(self, t):
            return t * self.by
        def __len__(self):
            return int(self.by * 4) + 1
make: $o = Scale%n(%f)
use: h = $o * h
between: $o.by = %v

# the length of an object
top:
    class Sized%n:
        def __init__(self, size):
            self.size = size
        def __len__(self):
            return self.size
make: $o = Sized%n(2)
use: h = h * len($o)
between: $o.size = 3 + i % 2

# the truth of an object
top:
    class Switch%n:
        def __init__(self):
            self.on = False
        def __bool__(self):
            return self.on
make: $o = Switch%n()
use: h = h * 2 if $o else h.sin()
between: $o.on = not $o.on

# an object that is iterated over
top:
    class Several%n:
        def __init__(self):
            self.items = [0.5, 0.75]
        def __iter__(self):
            yield from self.items
        def __contains__(self, x):
            return x in self.items
make: $o = Several%n()
use:
    for k in $o:
        h = h * k + 0.1
between: $o.items[0] = %v

# an object that is iterated over, with a global
top:
    class Several%n:
        def __iter__(self):
            return iter([FACTOR%n, 2.0])
    FACTOR%n = %f
make: $o = Several%n()
use:
    for k in $o:
        h = h * k
between: FACTOR%n = %v

# equality of objects
top:
    class Eq%n:
        def __init__(self, key):
            self.key = key
        def __eq__(self, other):
            return self.key == other.key
        __hash__ = None
make: $o = Eq%n(1)
make: $p = Eq%n(2)
use: h = h * 2 if $o == $p else h.cos()
between: $p.key = 1 + i % 2

# a number of one's own
top:
    class Number%n(float):
        @property
        def twice(self):
            return self * Number%n.factor
        factor = 2.0
make: $o = Number%n(%f)
use: h = h * $o.twice
between: Number%n.factor = %v

# an object as an index
top:
    class At%n:
        def __init__(self, at):
            self.at = at
        def __index__(self):
            return self.at
make: $o = At%n(1)
use: h = h + h[:, operator.index($o)].unsqueeze(1)
between: $o.at = 2

# an object that is called
top:
    class Act%n:
        def __init__(self, by):
            self.by = by
        def __call__(self, t):
            return torch.tanh(t * self.by)
make: $o = Act%n(%f)
use: h = $o(h)
between: $o.by = %v

# a descriptor
top:
    class Twice%n:
        def __set_name__(self, owner, name):
            self.name = "_" + name
        def __get__(self, instance, owner=None):
            return getattr(instance, self.name) * 2
        def __set__(self, instance, value):
            setattr(instance, self.name, value)
    class With%n:
        a = Twice%n()
        def __init__(self):
            self.a = %f
make: $o = With%n()
use: h = h * $o.a
between: $o.a = %v

# an attribute of a metaclass
top:
    class Meta%n(type):
        @property
        def factor(cls):
            return cls._factor * 2
    class Made%n(metaclass=Meta%n):
        _factor = %f
use: h = h * Made%n.factor
between: Made%n._factor = %v

# slots
top:
    class Slotted%n:
        __slots__ = ("a", "b")
        def __init__(self):
            self.a, self.b = %f, 1.0
make: $o = Slotted%n()
use: h = h * $o.a + $o.b
between: $o.b = %v

# a closure that is set from outside
top:
    def maker%n():
        by = %f
        def get(t):
            return t * by
        def put(value):
            nonlocal by
            by = value
        return get, put
    get%n, put%n = maker%n()
use: h = get%n(h)
between: put%n(%v)

# a cache of functools
top:
    @functools.lru_cache
    def table%n(k):
        return k * LEVEL%n[0]
    LEVEL%n = [%f]
use: h = h * table%n(2)
between:
    LEVEL%n[0] = %v
    table%n.cache_clear()

# a cached property
top:
    class Lazy%n:
        def __init__(self):
            self.base = %f
        @functools.cached_property
        def value(self):
            return self.base * 2
make: $o = Lazy%n()
use: h = h * $o.value
between:
    $o.base = %v
    $o.__dict__.pop("value", None)

# a dispatch on a type
top:
    @functools.singledispatch
    def handled%n(t):
        return t * 2
use: h = handled%n(h)
between: handled%n.register(torch.Tensor)(lambda t: t * 3)

# globals by name
top:
    LEVEL%n = %f
use: h = h * globals().get("LEVEL%n", 2.0)
between: LEVEL%n = %v

# attributes as a dictionary
make: $o = SimpleNamespace(a=%f)
use: h = h * vars($o)["a"]
between: $o.a = %v

# attributes by a getter
top:
    take%n = operator.attrgetter("a")
make: $o = SimpleNamespace(a=%f)
use: h = h * take%n($o)
between: $o.a = %v

# attributes whose names are made
make: $o = SimpleNamespace(a1=%f, a2=0.5)
use: h = h * sum(getattr($o, f"a{k}") for k in (1, 2))
between: $o.a1 = %v

# nested namespaces
make: $o = SimpleNamespace(inner=SimpleNamespace(deep={"a": [%f]}))
use: h = h * $o.inner.deep["a"][0]
between: $o.inner.deep["a"][0] = %v

# arguments of a command line
make: $o = argparse.Namespace(lr=%f, mode="x")
use: h = h * $o.lr
between: $o.lr = %v

# a module of the user's
top: helpers.level%n = %f
use: h = helpers.scaled(h, helpers.level%n)
between: helpers.level%n = %v

# a function of a module of the user's
use: h = helpers.act(h)
between: helpers.act = torch.sin

# a table of a module of the user's
use: h = h * helpers.CONFIG["deep"]["gain"]
between: helpers.CONFIG["deep"]["gain"] = %v

# a variable of the environment
top: os.environ["LEVEL%n"] = "%f"
use: h = h * float(os.environ.get("LEVEL%n", "2.0"))
between: os.environ["LEVEL%n"] = str(%v)

# a context variable
top: level%n = contextvars.ContextVar("level%n", default=%f)
use: h = h * level%n.get()
between: level%n.set(%v)

# a weak reference
make: $o = Thing(%f)
make: $r = weakref.ref($o)
use: h = h * $r().a
between: $o.a = %v

# a value of a thread
top:
    local%n = threading.local()
    local%n.a = %f
use: h = h * local%n.a
between: local%n.a = %v

# a set
make: $s = {"a"}
use: h = h * 2 if "b" in $s else h.sin()
between: $s.add("b")

# a deque of numbers
make: $d = collections.deque([%f, 0.5], maxlen=2)
use: h = h * sum($d)
between: $d.append(%v)

# a slice
make: $s = slice(0, 3)
use: h = h + h[:, $s].mean(1, keepdim=True)
between: $s = slice(1, 4)

# a range
make: $r = range(2)
use:
    for k in $r:
        h = h * (0.5 + k)
between: $r = range(1, 3)

# bytes that change in place
make: $b = bytearray(b"ab")
use: h = h * ($b[0] / 97)
between: $b[0] = 98 + i % 2

# an array of python
make: $a = array.array("d", [%f, 0.5])
use: h = h * $a[0]
between: $a[0] = %v

# a string that grows
make: $name = "ab"
use: h = h * len($name)
between: $name += "c"

# a fraction
make: $a = fractions.Fraction(1, 2)
use: h = h * float($a)
between: $a = fractions.Fraction(1 + i % 3, 4)

# a date
make: $d = datetime.date(2020, 1, 1)
use: h = h * $d.month
between: $d = datetime.date(2020, 2, 1)

# a path
make: $d = pathlib.Path("a/b")
use: h = h * len($d.name)
between: $d = pathlib.Path("a/abc")

# a dtype
make: $d = torch.float64
use: h = h + torch.ones(WIDTH, dtype=$d) * 0.5
between: $d = torch.float32

# the default dtype
use: h = h + torch.ones(WIDTH) / 2
between: torch.set_default_dtype(torch.float32 if i % 2 else torch.float64)

# a shape
make: $s = torch.Size([2, 3])
use: h = h.view(-1, *$s).sin().flatten(1)
between: $s = torch.Size([3, 2])

# a context manager of the user's
top:
    @contextlib.contextmanager
    def scaled_by%n():
        yield STRENGTH%n[0]
    STRENGTH%n = [%f]
use:
    with scaled_by%n() as by:
        h = h * by
between: STRENGTH%n[0] = %v

# a class as a context manager
top:
    class Ctx%n:
        level = %f
        def __enter__(self):
            return self
        def __exit__(self, *_):
            return False
        def __call__(self, t):
            return t * self.level
make: $c = Ctx%n()
use:
    with $c as c:
        h = c(h)
between: $c.level = %v

# a decorator
top:
    def doubled%n(fn):
        @functools.wraps(fn)
        def inner(*args, **kwargs):
            return fn(*args, **kwargs) * WITHIN%n
        return inner
    WITHIN%n = %f
    @doubled%n
    def inner%n(t):
        return t.sin()
use: h = inner%n(h)
between: WITHIN%n = %v

# a class as a decorator
top:
    class Scaled%n:
        def __init__(self, fn):
            self.fn, self.by = fn, %f
        def __call__(self, *args):
            return self.fn(*args) * self.by
    @Scaled%n
    def inner%n(t):
        return t.sin()
use: h = inner%n(h)
between: inner%n.by = %v

# a generator
top:
    def halves%n(t):
        for k in COUNTS%n:
            yield t * k
    COUNTS%n = [0.5, 0.25]
use: h = sum(halves%n(h))
between: COUNTS%n.append(%f)

# an exception
make: $t = {"a": %f}
use:
    try:
        h = h * $t["b"]
    except KeyError:
        h = h.sin()
between: $t["b"] = %v

# an early return
top:
    def early%n(t):
        if SKIP%n:
            return t
        return t.sin() * 2
    SKIP%n = False
use: h = early%n(h)
between: SKIP%n = not SKIP%n

# arguments by stars
top:
    def many%n(t, *args, **kwargs):
        for a in args:
            t = t * a
        return t + kwargs.get("add", 0.0)
make: $args = (%f, 0.5)
make: $kwargs = {"add": 0.5}
use: h = many%n(h, *$args, **$kwargs)
between: $kwargs["add"] = %v

# a static method and one of a class
top:
    class Tools%n:
        level = %f
        @staticmethod
        def twice(t):
            return t * 2
        @classmethod
        def scaled(cls, t):
            return cls.twice(t) * cls.level
use: h = Tools%n.scaled(h)
between: Tools%n.level = %v

# an import in the step
use:
    import helpers as inside
    h = h * inside.CONFIG["deep"]["gain"]
between: helpers.CONFIG["deep"]["gain"] = %v

# a table of several functions that share a list
top:
    shared%n = [%f]
    def reader%n(t):
        return t * shared%n[-1]
use: h = reader%n(h)
between: shared%n[:] = [%v]

# a list of lists
make: $m = [[1.0, 0.5], [0.25, 2.0]]
use: h = h * sum(map(sum, $m))
between: $m[1][0] = %v

# lists that are one
make: $a = [%f]
make: $b = $a
use: h = h * $b[0]
between: $a[0] = %v

# a type as a value
make: $kind = nn.Tanh
use: h = $kind()(h)
between: $kind = nn.Sigmoid

# an object that is replaced
make: $o = Thing(%f)
use: h = h * $o.a
between: $o = Thing(%v)

# a method that is kept
make: $o = Thing(%f)
make: $f = $o.scaled
use: h = $f(h)
between: $o.a = %v

# a step with a condition on a list
make: $l = []
use: h = h * 2 if $l else h.cos()
between: $l.append(1)

# a walrus
make: $t = {}
use:
    if (by := $t.get("by")) is not None:
        h = h * by
between: $t["by"] = %v

# a mapping proxy
make: $inner = {"a": %f}
make: $t = types.MappingProxyType($inner)
use: h = h * $t["a"]
between: $inner["a"] = %v

# sorted and enumerated
make: $t = [0.5, 0.25, 2.0]
use:
    for k, v in enumerate(sorted($t)):
        h = h * v + k * 0.1
between: $t[0] = %v

# a reversed list
make: $t = [0.5, 0.25, 2.0]
use:
    for v in reversed($t):
        h = (h * v).sin()
between: $t.reverse()

# module flags of torch
use: h = h * (2 if torch.is_grad_enabled() else 1)

# a list of a subclass
top:
    class Mine%n(list):
        def total(self):
            return sum(self) * self.gain
        gain = 1.0
make: $l = Mine%n([%f, 0.5])
use: h = h * $l.total()
between: $l[0] = %v

# an attribute of a list of a subclass
top:
    class Mine%n(list):
        def total(self):
            return sum(self) * self.gain
        gain = 1.0
make: $l = Mine%n([%f, 0.5])
use: h = h * $l.total()
between: $l.gain = %v

# an attribute of a dictionary of a subclass
top:
    class Mine%n(dict):
        gain = 1.0
make: $l = Mine%n(a=%f)
use: h = h * $l["a"] * $l.gain
between: $l.gain = %v

# an attribute of a tensor
make: $w = torch.ones(WIDTH)
init:
    self.anchor%n = nn.Parameter(torch.ones(WIDTH))
    self.anchor%n.gain = %f
use: h = h * getattr(self.anchor%n, "gain", 0.5)

# an attribute of an array of numpy
make: $a = np.arange(4.0)
use: h = h * $a[0:2].sum()
between: $a.resize((4,)); $a[1] = %v
"""

TENSORS = """
# a tensor that is replaced
make: $w = torch.ones(WIDTH)
use: h = h * $w
between: $w = torch.full((WIDTH,), %v)

# a tensor that is changed
make: $w = torch.ones(WIDTH)
use: h = h * $w
between: $w.mul_(%v)

# an element of a tensor
make: $w = torch.ones(WIDTH)
use: h = h * $w
between: $w[1] = %v

# a tensor of another shape
make: $w = torch.ones(WIDTH)
use: h = h * $w
between: $w = torch.full((1, 1), %f)

# a tensor of another dtype
make: $w = torch.ones(WIDTH)
use: h = h * $w
between: $w = $w.to(torch.int64) * 2

# tensors in a list
make: $l = [torch.ones(WIDTH), torch.full((), 0.5)]
use:
    for w in $l:
        h = h * w
between: $l[1] = torch.full((), %v)

# a list of tensors that gets longer
make: $l = [torch.ones(WIDTH), torch.full((), 0.5)]
use:
    for w in $l:
        h = h * w
between: $l.append(torch.full((), %f))

# a tensor of two names
make: $w = torch.ones(WIDTH)
make: $u = $w
use: h = h * $w + $u
between: $u.mul_(%v)

# a view of a tensor
make: $w = torch.ones(2, WIDTH)
make: $u = $w[0]
use: h = h * $u
between: $w.mul_(%v)

# a view that is changed
make: $w = torch.ones(2, WIDTH)
make: $u = $w[0]
use: h = h * $w.sum(0)
between: $u.mul_(%v)

# a tensor that shares memory with numpy
make: $a = np.ones(WIDTH)
make: $w = torch.from_numpy($a)
use: h = h * $w
between: $a[1] = %v

# the memory of a tensor
make: $w = torch.ones(WIDTH)
use: h = h * $w
between: $w.data = torch.full((WIDTH,), %v)

# a transposed tensor
make: $w = torch.eye(WIDTH)
make: $t = $w.t()
use: h = h @ $t
between: $w[0, 1] = %v

# a parameter by hand
make: $w = torch.ones(WIDTH, requires_grad=True)
use: h = h * $w
post:
    with torch.no_grad():
        $w -= 0.1 * $w.grad
        $w.grad = None
between:
    with torch.no_grad():
        $w.mul_(%v)

# a parameter by hand whose gradient is zeroed
make: $w = torch.ones(WIDTH, requires_grad=True)
use: h = h * $w
post:
    with torch.no_grad():
        $w -= 0.1 * $w.grad
    $w.grad.zero_()

# a leaf that starts to train
make: $w = torch.ones(WIDTH)
use: h = h * $w
between: $w.requires_grad_()

# a tensor that becomes none
make: $w = torch.ones(WIDTH)
use: h = h if $w is None else h * $w
between: $w = None if i % 2 else torch.full((WIDTH,), %f)

# an expanded tensor
make: $w = torch.full((1,), 0.5).expand(WIDTH)
use: h = h * $w
between: $w = torch.full((1,), %v).expand(WIDTH)

# a tensor with a mask
make: $w = torch.ones(WIDTH, dtype=torch.bool)
use: h = torch.where($w, h, 0.0)
between: $w[0] = False

# an index
make: $k = torch.arange(WIDTH)
use: h = h[:, $k]
between: $k = $k.flip(0)
"""

WITHIN = """
# a flag that is set once
make: $ready = False
use:
    if not $ready:
        $ready = True
        h = h * 3

# a flag that flips
make: $flip = False
use:
    $flip = not $flip
    h = h * 2 if $flip else h.sin()

# phases in turn
make: $phase = 0
use:
    $phase = ($phase + 1) % 3
    h = h * (1 + $phase)

# words in turn
make: $word = "a"
use:
    h = h * 2 if $word == "a" else h.sin()
    $word = {"a": "b", "b": "c", "c": "a"}[$word]

# a mean that is replaced
make: $mean = torch.zeros(WIDTH)
use:
    $mean = 0.9 * $mean + 0.1 * h.detach().mean(0)
    h = h - $mean

# a mean in place
make: $mean = torch.zeros(WIDTH)
use:
    $mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    h = h - $mean

# a mean by lerp
make: $mean = torch.zeros(WIDTH)
use:
    $mean.lerp_(h.detach().mean(0), 0.1)
    h = h - $mean.clone()

# a mean that is read before it changes
make: $mean = torch.zeros(WIDTH)
use:
    h = h - $mean
    $mean = torch.lerp($mean, h.detach().mean(0), 0.1)
between: $mean.zero_()

# a sum in place
make: $total = torch.zeros(())
use:
    $total += h.detach().sum()
    h = h + 0.01 * $total

# none, then a tensor
make: $last = None
use:
    if $last is not None:
        h = h + $last
    $last = h.detach().mean(0)

# none, then a tensor, then none again
make: $last = None
use:
    if $last is not None:
        h = h + $last
    $last = h.detach().mean(0)
between: $last = None

# a tensor for later
make: $last = torch.zeros(())
use: $last = h.detach().abs().sum()

# a tensor for later that was none
make: $last = None
use: $last = h.detach()

# a tensor with its graph for later
make: $last = None
use: $last = h.mean(0)

# statistics for later
make: $stats = {}
use:
    $stats["mean"] = h.detach().mean()
    $stats["max"] = h.detach().amax(0)

# statistics that are replaced
make: $stats = {}
use: $stats = {"mean": h.detach().mean(), "shape": 2, "parts": [h.detach().sum(0), (h.detach().mean(0),)]}

# a penalty that is read in the same step
make: $aux = None
use: $aux = h.pow(2).mean()
loss: loss = loss + 0.1 * $aux

# penalties in a list that is cleared
make: $aux = []
use: $aux.append(h.pow(2).mean())
loss:
    loss = loss + 0.1 * sum($aux)
    $aux.clear()

# penalties in a new list
make: $aux = [0.0]
use: $aux = [h.pow(2).mean(), h.abs().mean()]
loss: loss = loss + 0.1 * sum($aux)

# a cache
make: $cache = {}
use:
    if "scale" not in $cache:
        $cache["scale"] = torch.linspace(0.5, 1.5, WIDTH)
    h = h * $cache["scale"]

# a cache of plain values
make: $cache = {}
use:
    key = h.shape[-1]
    if key not in $cache:
        $cache[key] = 1 / math.sqrt(key)
    h = h * $cache[key]

# a cache that is cleared
make: $cache = {}
use: h = h * $cache.setdefault("scale", torch.linspace(0.5, 1.5, WIDTH))
between: $cache.clear()

# a cache by key
make: $cache = {}
use:
    if not hasattr($cache, "get") or $cache.get("k") is None:
        $cache["k"] = h.detach().mean(0)
    h = h - $cache["k"]

# a queue
make: $queue = collections.deque([torch.zeros(WIDTH) for _ in range(3)], maxlen=3)
use:
    h = h + sum($queue)
    $queue.append(0.1 * h.detach().mean(0))

# a queue that is turned
make: $queue = collections.deque([torch.full((WIDTH,), 0.1 * k) for k in range(3)])
use:
    h = h + $queue[0]
    $queue.rotate(1)

# a list as a queue
make: $queue = [torch.zeros(WIDTH), torch.ones(WIDTH)]
use:
    h = h + 0.1 * sum($queue)
    $queue = [*$queue[1:], h.detach().mean(0)]

# a list as a queue in place
make: $queue = [torch.zeros(WIDTH), torch.ones(WIDTH)]
use:
    h = h + 0.1 * sum($queue)
    $queue.pop(0)
    $queue.append(h.detach().mean(0))

# items of a list
make: $l = [torch.zeros(WIDTH), torch.ones(WIDTH)]
use:
    h = h + 0.1 * $l[0] * $l[1]
    $l[0] = h.detach().mean(0)

# items of a list in place
make: $l = [torch.zeros(WIDTH), torch.ones(WIDTH)]
use:
    h = h + 0.1 * $l[0] * $l[1]
    $l[0] += 0.1 * h.detach().mean(0)

# entries of a dictionary
make: $d = {"m": torch.zeros(WIDTH), "n": torch.zeros(())}
use:
    $d["m"] = 0.9 * $d["m"] + 0.1 * h.detach().mean(0)
    $d["n"] += 1
    h = h - $d["m"] / $d["n"]

# a tuple
make: $s = (torch.zeros(WIDTH), torch.zeros(WIDTH))
use:
    one, two = $s
    h = h + one * two
    $s = (h.detach().mean(0), one)

# a named tuple of state
top:
    State%n = collections.namedtuple("State%n", "one two")
make: $s = State%n(torch.zeros(WIDTH), torch.ones(WIDTH))
use:
    h = h + 0.1 * $s.one * $s.two
    $s = $s._replace(one=h.detach().mean(0))

# tensors that change places
make: $p = torch.full((WIDTH,), 0.5)
make: $q = torch.full((WIDTH,), 0.1)
use:
    h = h * (1 + $p) + $q
    $p, $q = $q, $p

# tensors that change places with values
make: $p = torch.full((WIDTH,), 0.5)
make: $q = torch.full((WIDTH,), 0.1)
use:
    h = h * (1 + $p) + $q
    $p, $q = $q + 0.1 * h.detach().mean(0), $p

# one tensor under two names
make: $p = torch.full((WIDTH,), 0.5)
make: $q = $p
use:
    h = h * $p + $q
    $p = 0.9 * $p

# one tensor under two names in place
make: $p = torch.full((WIDTH,), 0.5)
make: $q = $p
use:
    $p.mul_(0.9)
    h = h * $q

# one tensor under two names in place with an operator
make: $p = torch.full((WIDTH,), 0.5)
make: $q = $p
use:
    $p *= 0.9
    h = h * $q

# names that become one
make: $p = torch.full((WIDTH,), 0.5)
make: $q = torch.zeros(WIDTH)
use:
    h = h * $p + $q
    $q = $p
    $p.mul_(0.9)

# a new tensor under two names
make: $p = torch.full((WIDTH,), 0.5)
make: $q = torch.zeros(WIDTH)
use:
    h = h * $p + $q
    $p = $q = 0.1 * h.detach().mean(0)
between: $p.mul_(%v)

# a new tensor under two names that are not read
make: $p = None
make: $q = None
use: $p = $q = 0.1 * h.detach().mean(0)
between: $p.mul_(%v)

# a view that is kept
make: $w = torch.full((2, WIDTH), 0.5)
make: $v = $w[0]
use:
    h = h * $v
    $w.mul_(0.9)

# a view that is kept and changed
make: $w = torch.full((2, WIDTH), 0.5)
make: $v = $w[0]
use:
    $v.mul_(0.9)
    h = h * $w.sum(0)

# a view that the step makes
make: $w = torch.full((2, WIDTH), 0.5)
make: $v = torch.zeros(WIDTH)
use:
    h = h * $w.sum(0) + $v
    $v = $w[1]
    $w[0] = 0.1 * h.detach().mean(0)

# elements of a tensor
make: $w = torch.full((3, WIDTH), 0.5)
use:
    $w[1] = 0.1 * h.detach().mean(0)
    $w[:, 0] += 0.1
    h = h * $w.sum(0)

# a ring with a position
make: $ring = torch.zeros(3, WIDTH)
make: $at = torch.zeros((), dtype=torch.int64)
use:
    $ring.index_copy_(0, ($at % 3).view(1), 0.1 * h.detach().mean(0, keepdim=True))
    $at += 1
    h = h + $ring.mean(0)

# a ring that rolls
make: $ring = torch.zeros(3, WIDTH)
use:
    $ring = torch.roll($ring, 1, 0)
    $ring[0] = 0.1 * h.detach().mean(0)
    h = h + $ring.mean(0)

# a ring by cat
make: $ring = torch.zeros(3, WIDTH)
use:
    $ring = torch.cat([$ring[1:], 0.1 * h.detach().mean(0, keepdim=True)])
    h = h + $ring.mean(0)

# a step counted in a tensor
make: $count = torch.zeros(())
use:
    $count += 1
    h = h / (1 + $count)

# a step counted in a new tensor
make: $count = torch.zeros((), dtype=torch.int64)
use:
    $count = $count + 1
    h = h / (1 + $count)

# a copy into a tensor
make: $w = torch.zeros(WIDTH)
use:
    h = h + $w
    $w.copy_(0.1 * h.detach().mean(0))

# the memory of a tensor within the step
make: $w = torch.zeros(WIDTH)
use:
    h = h + $w
    $w.data = 0.1 * h.detach().mean(0)

# a tensor of another shape each time
make: $w = torch.ones(1)
use:
    h = h * $w.mean()
    $w = torch.cat([$w, $w.new_full((1,), 0.5)])

# a tensor that becomes a number
make: $w = torch.ones(())
use:
    h = h * $w
    $w = 0.5

# a number that becomes a tensor
make: $w = 1.0
use:
    h = h * $w
    $w = h.detach().abs().mean()

# two tensors with one update
make: $p = torch.zeros(WIDTH)
make: $q = torch.zeros(WIDTH)
use:
    new = 0.1 * h.detach().mean(0)
    $q = $p + new
    $p = new
    h = h + $p * $q

# an attribute that is deleted
make: $t = {"a": 1.0, "b": 0.5}
use:
    if "b" in $t:
        del $t["b"]
    h = h * sum($t.values())
between: $t["b"] = %v

# an entry that is popped and put back
make: $t = {"a": 1.0, "b": 0.5}
use:
    by = $t.pop("b")
    h = h * by
    $t["b"] = by

# a list that grows and shrinks
make: $stack = []
use:
    $stack.append(h)
    h = h.sin() + $stack.pop()

# a value that comes back
make: $mode = "a"
use:
    before = $mode
    $mode = "b"
    h = h * 2 if $mode == "b" else h.sin()
    $mode = before

# a context manager that sets a flag
top:
    class Set%n:
        on = False
        def __enter__(self):
            Set%n.on = True
        def __exit__(self, *_):
            Set%n.on = False
use:
    with Set%n():
        h = h * 2 if Set%n.on else h.sin()

# an object that the step makes
make: $o = None
use:
    $o = Thing(0.5)
    h = $o.scaled(h)

# an object with tensors that the step makes
make: $o = Thing(torch.zeros(WIDTH))
use:
    h = h + $o.a
    $o = Thing(0.1 * h.detach().mean(0))

# a dataclass of state
top:
    @dataclasses.dataclass
    class Memory%n:
        mean: object = None
        count: object = None
make: $o = Memory%n(torch.zeros(WIDTH), torch.zeros(()))
use:
    $o.mean = 0.9 * $o.mean + 0.1 * h.detach().mean(0)
    $o.count = $o.count + 1
    h = h - $o.mean / $o.count

# a dataclass of state that is replaced
top:
    @dataclasses.dataclass
    class Memory%n:
        mean: object = None
        count: object = None
make: $o = Memory%n(torch.zeros(WIDTH), torch.zeros(()))
use:
    $o = dataclasses.replace($o, mean=0.9 * $o.mean + 0.1 * h.detach().mean(0), count=$o.count + 1)
    h = h - $o.mean / $o.count

# attributes set by name
make: $o = SimpleNamespace(m0=torch.zeros(WIDTH), m1=torch.ones(WIDTH))
use:
    for k in range(2):
        setattr($o, f"m{k}", 0.9 * getattr($o, f"m{k}") + 0.1 * h.detach().mean(0))
        h = h - 0.1 * getattr($o, f"m{k}")

# attributes set through the dictionary
make: $o = SimpleNamespace(m=torch.zeros(WIDTH))
use:
    $o.__dict__.update(m=0.9 * $o.m + 0.1 * h.detach().mean(0))
    h = h - $o.m

# a closure with nonlocal
top:
    def keeper%n():
        kept = torch.zeros(WIDTH)
        def keep(t):
            nonlocal kept
            out = t + kept
            kept = 0.1 * t.detach().mean(0)
            return out
        return keep
    keep%n = keeper%n()
use: h = keep%n(h)

# a tensor kept on a function
top:
    def kept%n(t):
        out = t + kept%n.last
        kept%n.last = 0.1 * t.detach().mean(0)
        return out
    kept%n.last = torch.zeros(WIDTH)
use: h = kept%n(h)

# a tensor kept on a class
top:
    class Kept%n:
        last = torch.zeros(WIDTH)
        @classmethod
        def add(cls, t):
            out = t + cls.last
            cls.last = 0.1 * t.detach().mean(0)
            return out
use: h = Kept%n.add(h)

# a tensor kept in a default
top:
    def kept%n(t, memory={"last": torch.zeros(WIDTH)}):
        out = t + memory["last"]
        memory["last"] = 0.1 * t.detach().mean(0)
        return out
use: h = kept%n(h)

# a tensor kept in a module of the user's
top: helpers.last%n = torch.zeros(WIDTH)
use:
    h = h + helpers.last%n
    helpers.last%n = 0.1 * h.detach().mean(0)

# two flags
make: $a = False
make: $b = False
use:
    if $a and not $b:
        $b = True
        h = h * 2
    elif not $a:
        $a = True
        h = h.sin()

# a flag that is set once and cleared outside
make: $ready = False
use:
    if not $ready:
        $ready = True
        h = h * 3
between: $ready = False

# a set that is filled once
make: $seen = set()
use:
    if "x" not in $seen:
        $seen.add("x")
        h = h * 3

# a counter (may be refused)
make: $calls = 0
use:
    $calls += 1
    h = h * (1 + 0.1 * $calls)

# a counter that is not read (may be refused)
make: $calls = 0
use: $calls += 1

# a counter up to a limit (may be refused)
make: $calls = 0
use:
    if $calls < 2:
        $calls += 1
        h = h * 2

# a list that grows (may be refused)
make: $log = []
use: $log.append(h.detach().mean())

# a list of numbers that grows (may be refused)
make: $log = []
use: $log.append(h.shape[-1])

# a number that decays (may be refused)
make: $f = 1.0
use:
    $f = $f * 0.5
    h = h * $f

# a string that grows within (may be refused)
make: $f = ""
use:
    $f += "a"
    h = h * len($f)

# numbers of python drawn (may be refused)
use: h = h * random.random()

# numbers of numpy drawn (may be refused)
use: h = h * np.random.rand()

# a generator of one's own drawn (may be refused)
make: $rng = random.Random(0)
use: h = h * $rng.random()

# an iterator (may be refused)
make: $it = itertools.count(1)
use: h = h * next($it)

# a generator that goes on (may be refused)
top:
    def steps%n():
        k = 0.5
        while True:
            yield k
            k = k * 0.5
make: $it = steps%n()
use: h = h * next($it)

# a cycle (may be refused)
make: $it = itertools.cycle([0.5, 2.0])
use: h = h * next($it)

# the time (may be refused)
use: h = h * (1 + 0 * time.time())

# a decision on a value (may be refused)
use: h = h * 2 if h.sum() > 0 else h.sin()

# a value of a tensor (may be refused)
use: h = h * h.detach().mean().item()

# an array of numpy that is changed (may be refused)
make: $a = np.ones(WIDTH)
use:
    h = h * float($a[0])
    $a[0] += 1

# an array of python that is changed (may be refused)
make: $a = array.array("d", [1.0])
use:
    h = h * $a[0]
    $a[0] += 1

# bytes that are changed (may be refused)
make: $a = bytearray(b"a")
use:
    h = h * ($a[0] / 97)
    $a[0] += 1

# a context variable that is set (may be refused)
top: level%n = contextvars.ContextVar("level%n", default=0.5)
use:
    h = h * level%n.get()
    level%n.set(level%n.get() + 1)

# the environment that is set (may be refused)
top: os.environ["STEP%n"] = "1"
use:
    h = h * int(os.environ["STEP%n"])
    os.environ["STEP%n"] = str(int(os.environ["STEP%n"]) + 1)

# a counter behind an operator (may be refused)
top:
    class Ticks%n:
        def __init__(self):
            self.n = 0
        def __len__(self):
            self.n += 1
            return self.n
make: $o = Ticks%n()
use: h = h * len($o)

# a counter in a closure (may be refused)
top:
    def ticking%n():
        n = 0
        def tick():
            nonlocal n
            n += 1
            return n
        return tick
    tick%n = ticking%n()
use: h = h * tick%n()

# a counter in a set (may be refused)
make: $s = set()
use:
    $s.add(len($s))
    h = h * len($s)

# a collections counter (may be refused)
make: $c = collections.Counter()
use:
    $c["n"] += 1
    h = h * $c["n"]

# an alias of a parameter (may be refused)
init: self.al%n = nn.Parameter(torch.full((WIDTH,), 0.5))
make: $w = None
use:
    $w = self.al%n
    h = h * $w

# a kept tensor of the input (may be refused)
make: $w = None
use: $w = h

# a kept tensor of the argument itself
make: $w = None
loss: $w = x

# an item read after the loss
make: $w = None
loss: $w = out.detach().argmax(1)
"""

LAYERS = """
# a linear layer
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()

# tied weights
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    self.m%n = nn.Linear(WIDTH, WIDTH)
    self.m%n.weight = self.l%n.weight
use: h = self.m%n(self.l%n(h).tanh())

# layers in a list
init: self.l%n = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
use:
    for layer in self.l%n:
        h = h + layer(h).tanh()
between: self.l%n[0] = nn.Tanh()

# layers in a dictionary
init: self.l%n = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Tanh()})
use: h = self.l%n["b"](self.l%n["a"](h))
between: self.l%n["b"] = nn.ReLU()

# a layer that is appended
init: self.l%n = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
use: h = self.l%n(h)
between: self.l%n.append(nn.Softplus())

# a layer that is taken out
init: self.l%n = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Softplus())
use: h = self.l%n(h)
between: self.l%n.pop(-1) if len(self.l%n) > 1 else None

# layer norm
init: self.l%n = nn.LayerNorm(WIDTH)
use: h = self.l%n(h)
between: self.l%n.eps = 0.1

# batch norm (whole batches)
init: self.l%n = nn.BatchNorm1d(WIDTH)
use: h = self.l%n(h)

# batch norm of a cumulative mean (whole batches)
init: self.l%n = nn.BatchNorm1d(WIDTH, momentum=None)
use: h = self.l%n(h)

# batch norm whose momentum changes (whole batches)
init: self.l%n = nn.BatchNorm1d(WIDTH)
use: h = self.l%n(h)
between: self.l%n.momentum = %f

# batch norm that is frozen (whole batches)
init: self.l%n = nn.BatchNorm1d(WIDTH)
use: h = self.l%n(h)
between: self.l%n.eval()

# batch norm that is reset (whole batches)
init: self.l%n = nn.BatchNorm1d(WIDTH)
use: h = self.l%n(h)
between: self.l%n.reset_running_stats()

# an lstm
init: self.l%n = nn.LSTM(2, WIDTH, batch_first=True)
use: h = h + self.l%n(h.view(-1, 3, 2))[0][:, -1]

# a gru with hidden state (changes state)
init: self.l%n = nn.GRUCell(WIDTH, WIDTH)
make: $s = torch.zeros(1, WIDTH)
use:
    out%n = self.l%n(h, $s.expand(h.shape[0], -1))
    $s = out%n.detach().mean(0, keepdim=True)
    h = h + out%n

# attention
init: self.l%n = nn.MultiheadAttention(2, 1, batch_first=True)
use:
    t%n = h.view(-1, 3, 2)
    h = h + self.l%n(t%n, t%n, t%n, need_weights=False)[0].flatten(1)

# scaled dot product attention
init: self.l%n = nn.Linear(WIDTH, 3 * WIDTH)
use:
    q%n, k%n, v%n = self.l%n(h).view(-1, 3, 3, 2).unbind(1)
    h = h + F.scaled_dot_product_attention(q%n, k%n, v%n).flatten(1)

# a convolution
init: self.l%n = nn.Conv1d(1, 2, 3, padding=1)
use: h = h + self.l%n(h.unsqueeze(1)).mean(1)

# an embedding
init: self.l%n = nn.Embedding(5, WIDTH)
use: h = h + self.l%n(torch.arange(WIDTH, device=h.device) % 5).mean(0)

# dropout that is off
init: self.l%n = nn.Dropout(0.0)
use: h = self.l%n(h)
between: self.l%n.p = 1.0 if i % 2 else 0.0

# dropout in evaluation
init: self.l%n = nn.Dropout(0.5).eval()
use: h = h if self.l%n.training else self.l%n(h)

# a slope
init: self.l%n = nn.LeakyReLU(0.1)
use: h = self.l%n(h)
between: self.l%n.negative_slope = %v

# weight norm
init: self.l%n = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
use: h = self.l%n(h).tanh()

# a parametrization
top:
    class Sym%n(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).t()
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    nn.utils.parametrize.register_parametrization(self.l%n, "weight", Sym%n())
use: h = self.l%n(h).tanh()

# a parametrization that is taken off
top:
    class Half%n(nn.Module):
        def forward(self, w):
            return w * 0.5
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    nn.utils.parametrize.register_parametrization(self.l%n, "weight", Half%n())
use: h = self.l%n(h).tanh()
between:
    if nn.utils.parametrize.is_parametrized(self.l%n):
        nn.utils.parametrize.remove_parametrizations(self.l%n, "weight")

# pruning
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between:
    if not hasattr(self.l%n, "weight_mask"):
        nn.utils.prune.l1_unstructured(self.l%n, "weight", 0.5)

# parameters in a list
init: self.l%n = nn.ParameterList([nn.Parameter(torch.full((WIDTH,), 0.5)) for _ in range(2)])
use:
    for p in self.l%n:
        h = h * p

# a buffer
init: self.register_buffer("b%n", torch.full((WIDTH,), 0.5))
use: h = h * self.b%n
between: self.b%n.mul_(%f)

# a buffer that is replaced between calls
init: self.register_buffer("b%n", torch.full((WIDTH,), 0.5))
use: h = h * self.b%n
between: self.b%n = torch.full((WIDTH,), %v)

# a buffer that the step replaces (changes state)
init: self.register_buffer("b%n", torch.zeros(WIDTH))
use:
    self.b%n = 0.9 * self.b%n + 0.1 * h.detach().mean(0)
    h = h - self.b%n

# a buffer that is none
init: self.register_buffer("b%n", None)
use:
    if self.b%n is None:
        self.b%n = torch.full((WIDTH,), 0.5)
    h = h * self.b%n

# a buffer that is not kept (changes state)
init: self.register_buffer("b%n", torch.zeros(WIDTH), persistent=False)
use:
    with torch.no_grad():
        self.b%n.add_(h.mean(0), alpha=0.1)
    h = h - self.b%n

# a view of a buffer that is kept
init:
    self.register_buffer("b%n", torch.full((2, WIDTH), 0.5))
    self.v%n = self.b%n[0]
use:
    self.b%n.mul_(0.9)
    h = h * self.v%n

# a layer that is replaced
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between: self.l%n = nn.Linear(WIDTH, WIDTH)

# a layer that becomes another kind
init: self.l%n = nn.Tanh()
use: h = self.l%n(h)
between: self.l%n = nn.Sigmoid()

# a layer whose forward is replaced
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h)
between: self.l%n.forward = lambda t: t.sin()

# a layer that is made by the first call
init: self.l%n = None
use:
    if self.l%n is None:
        self.l%n = nn.Tanh()
    h = self.l%n(h)

# a layer with parameters that is made by the first call (may be refused)
init: self.l%n = None
use:
    if self.l%n is None:
        self.l%n = nn.Linear(WIDTH, WIDTH)
    h = self.l%n(h)

# a layer that is frozen
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between: self.l%n.requires_grad_(False)

# a layer that thaws
init: self.l%n = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
use: h = self.l%n(h).tanh()
between: self.l%n.requires_grad_(bool(i % 2))

# a bias that is frozen
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between: self.l%n.bias.requires_grad = False

# a weight that is scaled
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between: self.l%n.weight.data.mul_(%f)

# a weight that is set
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between:
    with torch.no_grad():
        self.l%n.weight.copy_(torch.eye(WIDTH) * %f)

# a weight whose memory is replaced
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between: self.l%n.weight.data = torch.eye(WIDTH) * %f

# a weight that is another parameter
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between: self.l%n.weight = nn.Parameter(torch.eye(WIDTH) * %f)

# a bias that is taken away
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between: self.l%n.bias = None

# a layer that is initialised again
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between: nn.init.constant_(self.l%n.weight, %f)

# a layer that is loaded
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h).tanh()
between: self.l%n.load_state_dict({"weight": torch.eye(WIDTH) * %f, "bias": torch.zeros(WIDTH)})

# two layers that become one
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    self.m%n = nn.Linear(WIDTH, WIDTH)
use: h = self.m%n(self.l%n(h).tanh())
between: self.m%n.weight = self.l%n.weight

# two layers that change places
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    self.m%n = nn.Linear(WIDTH, WIDTH)
use: h = self.m%n(self.l%n(h).tanh())
between: self.m%n, self.l%n = self.l%n, self.m%n

# a layer by name
init:
    self.one%n = nn.Tanh()
    self.two%n = nn.Sigmoid()
    self.which%n = "one"
use: h = getattr(self, self.which%n + "%n")(h)
between: self.which%n = "two"

# a hook before a layer
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h)
between: self.l%n.register_forward_pre_hook(lambda module, args: (args[0] * 2,))

# a hook behind a layer
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h)
between: self.l%n.register_forward_hook(lambda module, args, out: out * 0.5)

# a hook that is taken off
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    self.hook%n = self.l%n.register_forward_hook(lambda module, args, out: out * 0.5)
use: h = self.l%n(h)
between: self.hook%n.remove()

# a hook that reads
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    self.l%n.register_forward_hook(lambda module, args, out: out * module.gain)
    self.l%n.gain = %f
use: h = self.l%n(h)
between: self.l%n.gain = %v

# a hook that keeps
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    self.l%n.register_forward_hook(lambda module, args, out: setattr(module, "seen", out.detach().mean(0)))
    self.l%n.seen = torch.zeros(WIDTH)
use: h = self.l%n(h) + 0.1 * self.l%n.seen

# a hook that keeps by name
top: taken%n = {}
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    self.l%n.register_forward_hook(lambda module, args, out: taken%n.update(seen=out.detach()))
use: h = self.l%n(h)

# a hook of a backward pass
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    self.l%n.register_full_backward_hook(lambda module, into, out: tuple(None if g is None else g * 2 for g in into))
use: h = self.l%n(h)

# a hook of a gradient
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = self.l%n(h)
between: self.l%n.weight.register_hook(lambda g: g * 0.5)

# a hook of an activation
init: self.one%n = 1
use:
    if h.requires_grad:
        h = h * 1
        h.register_hook(lambda g: g * 0.5)

# a hook behind a gradient
top:
    def halve%n(p):
        p.grad.mul_(0.5)
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    self.l%n.weight.register_post_accumulate_grad_hook(halve%n)
use: h = self.l%n(h)

# hooks of all modules
top: gain%n = [0.5]
init: self.l%n = nn.Softplus()
use: h = self.l%n(h)
between: self.l%n.register_forward_hook(lambda m, a, out: out * gain%n[0])

# a function of one's own
top:
    class Twice%n(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t * FACTOR%n
        @staticmethod
        def backward(ctx, g):
            (t,) = ctx.saved_tensors
            return g * FACTOR%n + 0 * t
    FACTOR%n = %f
use: h = Twice%n.apply(h)
between: FACTOR%n = %v

# a checkpoint
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = torch.utils.checkpoint.checkpoint(self.l%n, h, use_reentrant=False).tanh()

# a checkpoint by flag
init:
    self.l%n = nn.Linear(WIDTH, WIDTH)
    self.again%n = False
use: h = torch.utils.checkpoint.checkpoint(self.l%n, h, use_reentrant=False) if self.again%n else self.l%n(h)
between: self.again%n = not self.again%n

# no_grad by a flag
init: self.l%n = nn.Linear(WIDTH, WIDTH)
make: $frozen = False
use:
    with torch.set_grad_enabled(not $frozen):
        t%n = self.l%n(h)
    h = h + t%n
between: $frozen = bool(i % 2)

# stochastic depth that is off
make: $keep = [True, True]
init: self.l%n = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
use:
    for keep, layer in zip($keep, self.l%n):
        if keep:
            h = h + layer(h).tanh()
every: $keep[:] = [i % 2 == 0, True]

# functional call
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use: h = torch.func.functional_call(self.l%n, {"weight": self.l%n.weight * 0.5}, (h,)).tanh()

# a part of a layer's name
init:
    for k in range(2):
        setattr(self, f"l%n_{k}", nn.Linear(WIDTH, WIDTH))
use:
    for k in range(2):
        h = getattr(self, f"l%n_{k}")(h).tanh()
between: setattr(self, "l%n_0", nn.Sigmoid())

# a module's own attribute
init: self.depth%n = 1
use:
    for _ in range(self.depth%n):
        h = h.tanh()
between: self.depth%n = 1 + i % 3

# weights that are standardized
init: self.l%n = nn.Linear(WIDTH, WIDTH)
use:
    w%n = self.l%n.weight
    h = F.linear(h, (w%n - w%n.mean()) / (w%n.std() + 0.1), self.l%n.bias)

# spectral norm in evaluation
init: self.l%n = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).eval()
use: h = self.l%n(h).tanh()

# spectral norm
init: self.l%n = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
use: h = self.l%n(h).tanh()

# a lazy layer that has seen a batch
init:
    self.l%n = nn.LazyLinear(WIDTH)
    self.l%n(torch.zeros(1, WIDTH))
use: h = self.l%n(h).tanh()
"""

STEPS = """
# a weight of a penalty
make: $w = %f
loss: loss = loss + $w * out.pow(2).mean()
between: $w = %v

# a penalty on weights
loss: loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters())

# a penalty on some weights
make: $names = ["weight"]
loss: loss = loss + 0.01 * sum(p.abs().sum() for n, p in model.named_parameters() if n.split(".")[-1] in $names)
between: $names.append("bias")

# clipping by norm
make: $clip = 0.5
grad: torch.nn.utils.clip_grad_norm_(model.parameters(), $clip)
between: $clip = %f

# clipping by value
make: $clip = 0.5
grad: torch.nn.utils.clip_grad_value_(model.parameters(), $clip)
between: $clip = None if $clip is None else %f

# gradients that are scaled
make: $by = 0.5
grad:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_($by)
between: $by = %v

# gradients that are replaced
grad:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad / (1 + p.grad.norm())

# gradients of the head that are dropped
grad: model.head.weight.grad = None

# gradients of the head that are dropped by flag
make: $drop = False
grad:
    if $drop:
        model.head.weight.grad = None
between: $drop = not $drop

# a mean of weights by hand
top: shadow%n = {}
post:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name not in shadow%n:
                shadow%n[name] = p.detach().clone()
            else:
                shadow%n[name].mul_(0.9).add_(p, alpha=0.1)

# a mean of weights that is replaced
top: shadow%n = {}
post:
    for name, p in model.named_parameters():
        old = shadow%n.get(name, torch.zeros_like(p))
        shadow%n[name] = 0.9 * old + 0.1 * p.detach()

# weights that are clamped
make: $limit = 0.5
post:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-$limit, $limit)
between: $limit = %f + 0.5

# weights that are clamped through data
post:
    for p in model.parameters():
        p.data.clamp_(-0.5, 0.5)

# weights that decay
post:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)

# a learning rate
between: optimizer.param_groups[0]["lr"] = 0.01 + 0.01 * i

# a learning rate each time
every:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9

# a weight decay
between: optimizer.param_groups[0]["weight_decay"] = %f * 0.1

# a learning rate that the step sets (may be refused)
post: optimizer.param_groups[0]["lr"] *= 0.9

# a learning rate that the step reads
loss: loss = loss * (1 + optimizer.param_groups[0]["lr"])
between: optimizer.param_groups[0]["lr"] = 0.02

# another group
top: extra%n = nn.Parameter(torch.full((CLASSES,), 0.1))
loss: loss = loss + (out * extra%n).mean()
between:
    if not any(extra%n is p for group in optimizer.param_groups for p in group["params"]):
        optimizer.add_param_group({"params": [extra%n], "lr": 0.05})

# another group that is there already
top: extra%n = nn.Parameter(torch.full((CLASSES,), 0.1))
make: $on = False
loss: loss = loss + (out * extra%n).mean() if $on else loss
between:
    $on = True
    if not any(extra%n is p for group in optimizer.param_groups for p in group["params"]):
        optimizer.add_param_group({"params": [extra%n]})

# an optimizer that is replaced
between: optimizer = torch.optim.SGD(model.parameters(), lr=%f * 0.1)

# an optimizer that is replaced by another kind
between: optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)

# an optimizer that is loaded
between: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

# an optimizer's state that is cleared
between: optimizer.state.clear()

# an optimizer's state that is changed
between:
    for values in optimizer.state.values():
        for name, t in values.items():
            if isinstance(t, torch.Tensor) and t.dim():
                t.mul_(0.5)

# a model that is loaded
between: model.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in model.state_dict().items()})

# a model that is evaluated
between: model.eval()

# a model that takes turns
every: model.train(i % 2 == 0)

# a head that is replaced
between: model.head = nn.Linear(WIDTH, CLASSES)

# a head that is replaced with its optimizer
between:
    model.head = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# gradients that are cleared outside
between: model.zero_grad()

# a gradient that is set outside
between: model.head.weight.grad = torch.full_like(model.head.weight, %f)

# gradients that are scaled outside
between:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(%f)

# weights that are scaled outside
between:
    for p in model.parameters():
        p.data.mul_(0.9)

# weights that are noisy outside
between:
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.add_(torch.linspace(0, 0.1, p.numel()).view_as(p))

# a step of the optimizer outside
every: optimizer.step() if i > 1 else None

# a loss that is a function
make: $criterion = F.cross_entropy
loss: loss = loss + 0.1 * $criterion(out, y)
between: $criterion = F.multi_margin_loss

# a loss with weights
make: $criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, CLASSES))
loss: loss = loss + 0.1 * $criterion(out, y)
between: $criterion.weight = torch.linspace(1.0, 2.0, CLASSES)

# a loss with smoothing
make: $criterion = nn.CrossEntropyLoss()
loss: loss = loss + 0.1 * $criterion(out, y)
between: $criterion.label_smoothing = %f * 0.1

# several losses
make: $weights = {"ce": 1.0, "l2": 0.1}
loss:
    losses = {"ce": F.cross_entropy(out, y), "l2": out.pow(2).mean(), "l1": out.abs().mean()}
    loss = loss + sum(w * losses[k] for k, w in $weights.items())
between: $weights["l1"] = %v

# a metric for later
make: $accuracy = None
loss: $accuracy = (out.argmax(1) == y).double().mean()

# metrics in a dictionary
make: $metrics = {}
post:
    $metrics["loss"] = loss.detach()
    $metrics["norm"] = torch.stack([p.norm() for p in model.parameters()]).norm().detach()

# a running loss
make: $running = None
post: $running = loss.detach() if $running is None else 0.9 * $running + 0.1 * loss.detach()

# a running loss in place
make: $running = torch.zeros(())
post: $running += loss.detach()

# the best weights
make: $best = torch.full((), 1e9)
top: weights%n = {}
post:
    better = loss.detach() < $best
    $best = torch.where(better, loss.detach(), $best)
    old = weights%n.get("head", torch.zeros(CLASSES, WIDTH))
    weights%n["head"] = torch.where(better, model.head.weight.detach(), old)

# a teacher
top: teacher%n = nn.Linear(WIDTH, CLASSES)
loss: loss = loss + 0.1 * F.mse_loss(out, teacher%n(x).detach())
post:
    with torch.no_grad():
        teacher%n.weight.lerp_(model.head.weight, 0.1)

# a teacher that is a copy
make: $teacher = None
loss:
    with torch.no_grad():
        target%n = out if $teacher is None else $teacher(x)
    loss = loss + 0.1 * F.mse_loss(out, target%n)
between: $teacher = copy.deepcopy(model).requires_grad_(False)

# averaged weights of torch
make: $average = None
every: $average = $average or torch.optim.swa_utils.AveragedModel(model)
between: $average.update_parameters(model)

# a gradient penalty
loss:
    grads%n = torch.autograd.grad(loss, list(model.head.parameters()), create_graph=True)
    loss = loss + 0.1 * sum(g.pow(2).sum() for g in grads%n)

# gradients that are kept for later
make: $grads = None
grad: $grads = [p.grad.clone() for p in model.head.parameters() if p.grad is not None]

# the norm of gradients for later
make: $norm = None
grad: $norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

# momentum by hand
top: momentum%n = {}
grad:
    for name, p in model.named_parameters():
        if p.grad is not None:
            momentum%n[name] = 0.9 * momentum%n.get(name, torch.zeros_like(p)) + p.grad
            p.grad = momentum%n[name].clone()

# an exponent of labels
make: $temperature = torch.ones(())
loss: loss = loss + F.cross_entropy(out / $temperature, y)
post: $temperature.mul_(0.9)

# a schedule outside
top: schedule%n = None
every:
    if schedule%n is None or schedule%n.optimizer is not optimizer:
        schedule%n = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    elif i > 1:
        schedule%n.step()

# a schedule in the step (may be refused)
make: $schedule = None
post:
    if $schedule is not None:
        $schedule.step()
every: $schedule = $schedule or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

# a step that is skipped by flag
make: $skip = False
grad:
    if $skip:
        model.zero_grad()
between: $skip = not $skip

# a print of a loss (may be refused)
post: text = f"{loss}"

# a model that is copied outside
between: model = copy.deepcopy(model); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def _parts(text: str, kind: str) -> Iterator[Part]:
    for block in text.strip().split("\n# "):
        title, *lines = block.removeprefix("# ").splitlines()
        sections: dict[str, str] = {}
        section = ""
        for line in lines:
            if begins := re.match(rf"({'|'.join(SECTIONS)}):\s*(.*)$", line):
                section = begins[1]
                sections.setdefault(section, "")
                line = " " * 4 + begins[2] if begins[2] else ""
            if line.strip():
                sections[section] += line[4:] + "\n"
        yield Part(f"{kind}: {title}", "(may be refused)" in title, sections)


TEXTS = {
    "read": READ, "tensors": TENSORS, "within": WITHIN, "layers": LAYERS, "steps": STEPS, "arguments": ARGUMENTS,
    "loops": LOOPS, "rare": RARE,
}  # fmt: skip
PARTS = {kind: tuple(_parts(text, kind)) for kind, text in TEXTS.items()}
