"""Still more of ``script_parts``: ways of Python and torch to hold, to find and to change something that are rarer."""

__all__ = ["RARE"]

RARE = """
# a list of the user's by collections
make: $t = collections.UserList([%f, 0.5])
use: h = h * $t[0] + $t[1]
between: $t[0] = %v

# a list of the user's that gets longer
make: $t = collections.UserList([%f])
use:
    for k in $t:
        h = (h * k).sin()
between: $t.append(%v)

# a text of the user's by collections
make: $t = collections.UserString("ab")
use: h = h * len($t)
between: $t.data = "abc"

# an array of objects
make: $a = np.array([%f, 0.5, None], dtype=object)
use: h = h * $a[0]
between: $a[0] = %v

# a structured array
make: $a = np.zeros(2, dtype=[("a", "f8"), ("b", "i4")])
use: h = h * (1 + float($a["a"][1]))
between: $a["a"][1] = %v

# an array with a mask
make: $a = np.ma.masked_array([1.0, 2.0, 3.0], mask=[0, 0, 1])
use: h = h * float($a.sum())
between: $a[0] = %v

# an array of numpy without dims
make: $a = np.array(%f)
use: h = h * float($a)
between: $a[...] = %v

# a view of an array of numpy
make: $a = np.ones((3, WIDTH))
make: $v = $a[1]
use: h = h * torch.as_tensor($v)
between: $a[1, 2] = %v

# a set of objects
make: $s = {Thing(%f)}
use:
    for t in $s:
        h = t.scaled(h)
between:
    for t in $s:
        t.a = %v

# objects as keys
make: $t = {Thing(%f): 0.5}
use:
    for key, value in $t.items():
        h = h * key.a + value
between: next(iter($t)).a = %v

# parameters as keys
init:
    self.by%n = nn.Parameter(torch.ones(WIDTH))
    self.scales%n = {self.by%n: %f}
use: h = h * self.by%n * self.scales%n[self.by%n]
between: self.scales%n[next(iter(self.scales%n))] = %v

# modules as keys
init:
    self.lin%n = nn.Linear(WIDTH, WIDTH)
    self.scales%n = {self.lin%n: %f}
use:
    for layer, by in self.scales%n.items():
        h = h + by * layer(h)
between: self.scales%n[self.lin%n] = %v

# functions as keys
make: $t = {torch.sin: %f}
use:
    for f, by in $t.items():
        h = f(h) * by
between: $t[torch.cos] = %v

# a weak dictionary
make: $o = Thing(1.0)
make: $t = weakref.WeakKeyDictionary({$o: %f})
use: h = h * $t[$o]
between: $t[$o] = %v

# weak values
make: $o = Thing(%f)
make: $t = weakref.WeakValueDictionary({"a": $o})
use: h = h * $t["a"].a
between: $o.a = %v

# a weak set
make: $o = Thing(%f)
make: $s = weakref.WeakSet([$o])
use:
    for one in $s:
        h = h * one.a
between: $o.a = %v

# a weak method
make: $o = Thing(%f)
make: $m = weakref.WeakMethod($o.scaled)
use: h = $m()(h)
between: $o.a = %v

# a proxy
make: $o = Thing(%f)
make: $p = weakref.proxy($o)
use: h = h * $p.a
between: $o.a = %v

# a number with attributes
top:
    class Rate%n(float):
        pass
make: $r = Rate%n(%f)
make: $r.more = 1.5
use: h = h * $r * $r.more
between: $r.more = %v

# a text with attributes
top:
    class Name%n(str):
        by = 1.5
make: $r = Name%n("ab")
use: h = h * len($r) * $r.by
between: $r.by = %v

# a tuple with attributes
top:
    class Shape%n(tuple):
        by = 1.5
make: $r = Shape%n((%f, 0.5))
use: h = h * $r[0] * $r.by
between: $r.by = %v

# an attribute of a number of an enum
top:
    class Level%n(enum.IntEnum):
        LOW = 1
        HIGH = 2
    Level%n.LOW.by = %f
make: $p = Level%n.LOW
use: h = h * $p * $p.by
between: Level%n.LOW.by = %v

# an attribute of a member of an enum
top:
    class Level%n(enum.Enum):
        LOW = 1
        HIGH = 2
    Level%n.LOW.by = %f
use: h = h * Level%n.LOW.by
between: Level%n.LOW.by = %v

# a text of an enum
top:
    class Mode%n(enum.StrEnum):
        SIN = "sin"
        COS = "cos"
make: $mode = Mode%n.SIN
use: h = getattr(torch, $mode)(h)
between: $mode = Mode%n.COS

# an enum with methods
top:
    class Act%n(enum.Enum):
        SIN = "sin"
        COS = "cos"
        def __call__(self, t):
            return getattr(torch, self.value)(t)
make: $act = Act%n.SIN
use: h = $act(h)
between: $act = Act%n["COS"]

# a getter of a dictionary
make: $t = {"a": %f}
make: $get = $t.get
use: h = h * $get("a", 1.0)
between: $t["a"] = %v

# an item getter of a list
make: $t = [%f, 0.5]
make: $get = $t.__getitem__
use: h = h * $get(0)
between: $t[0] = %v

# values of a dictionary
make: $t = {"a": %f}
make: $values = $t.values()
use: h = h * sum($values)
between: $t["a"] = %v

# items of a dictionary
make: $t = {"a": %f}
make: $items = $t.items()
use:
    for k, v in $items:
        h = h * v
between: $t["b"] = %v

# memory that is looked at
make: $b = bytearray(b"ab")
make: $m = memoryview($b)
use: h = h * ($m[0] / 97)
between: $b[0] = 98 + i % 2

# a number of c
top: import ctypes
make: $c = ctypes.c_double(%f)
use: h = h * $c.value
between: $c.value = %v

# an array of c
top: import ctypes
make: $c = (ctypes.c_double * 2)(%f, 0.5)
use: h = h * $c[0]
between: $c[0] = %v

# a heap
top: import heapq
make: $t = [0.9, 1.1]
use: h = h * $t[0]
between: heapq.heappushpop($t, %v)

# a queue of Python
top: import queue
make: $t = queue.Queue()
make: $t.put(%f)
use: h = h * $t.queue[0]
between: $t.queue[0] = %v

# an event
make: $e = threading.Event()
use: h = h.sin() if $e.is_set() else h.cos()
between: $e.set()

# a text file in memory
top: import io
make: $t = io.StringIO("0.5")
use: h = h * float($t.getvalue())
between:
    $t.seek(0)
    $t.write("0.7")

# a file (may be refused)
top: pathlib.Path(__file__).with_name("level%n").write_text("0.5")
use: h = h * float(pathlib.Path(__file__).with_name("level%n").read_text())
between: pathlib.Path(__file__).with_name("level%n").write_text(str(%v))

# a file that is opened (may be refused)
top: pathlib.Path(__file__).with_name("level%n").write_text("0.5")
use:
    with open(pathlib.Path(__file__).with_name("level%n")) as file:
        h = h * float(file.read())
between: pathlib.Path(__file__).with_name("level%n").write_text(str(%v))

# a file that is there, by its path (may be refused)
use: h = h.sin() if pathlib.Path(__file__).with_name("stop%n").exists() else h.cos()
between: pathlib.Path(__file__).with_name("stop%n").touch()

# a level of a logger
top: import logging
make: $log = logging.getLogger("random%n")
use: h = h.sin() if $log.isEnabledFor(logging.INFO) else h.cos()
between: $log.setLevel(logging.INFO)

# a template
top: import string
make: $t = string.Template("$$a")
use: h = h * len($t.template)
between: $t.template = "abc"

# a parsed configuration
top: import configparser
make: $c = configparser.ConfigParser()
make: $c.read_dict({"model": {"gain": "0.5"}})
use: h = h * $c["model"].getfloat("gain")
between: $c["model"]["gain"] = str(%v)

# a text that is evaluated
top: LEVEL%n = %f
use: h = h * eval("LEVEL%n * 2", globals())
between: LEVEL%n = %v

# a text that is kept and evaluated
top: SCALE%n = "2 * 0.5"
use: h = h * eval(SCALE%n)
between: SCALE%n = "2 * 0.7"

# code that is run
top:
    made%n = {}
    exec("def made(t):\\n    return t * 0.5", made%n)
use: h = made%n["made"](h)
between: exec("def made(t):\\n    return t * 0.7", made%n)

# a variable of the environment with a made name
top: os.environ["LEVEL" + str(%n)] = "%f"
use: h = h * float(os.environ["LEVEL" + str(%n)])
between: os.environ["LEVEL" + str(%n)] = str(%v)

# variables of the environment as a dictionary
top: os.environ["LEVEL%n"] = "%f"
use: h = h * float({**os.environ}["LEVEL%n"])
between: os.environ["LEVEL%n"] = str(%v)

# a module that makes its attributes
top:
    helpers.LEVELS%n = {"level%n": %f}
    helpers.__getattr__ = lambda name, levels=helpers.LEVELS%n: levels[name]
use: h = h * helpers.level%n
between: helpers.LEVELS%n["level%n"] = %v

# a function of torch that is replaced
top: normal%n = F.softsign
use: h = F.softsign(h)
between: F.softsign = torch.sin
after: F.softsign = normal%n

# a function of torch that is replaced for good
top: old%n = F.hardtanh
use: h = F.hardtanh(h) if old%n is not None else h
between: F.hardtanh = lambda t: t * 0.5
after:
    if i == CALLS - 1:
        F.hardtanh = old%n

# a function of torch that is wrapped
top: plain%n = F.hardswish
use: h = F.hardswish(h)
between: F.hardswish = lambda *args, **kwargs: plain%n(*args, **kwargs) * 1.5
after: F.hardswish = plain%n

# a method of tensors that is wrapped
top: plain%n = torch.Tensor.norm
use: h = h / (1 + h.norm(dim=1, keepdim=True))
between: torch.Tensor.norm = lambda *args, **kwargs: plain%n(*args, **kwargs) * 1.5
after: torch.Tensor.norm = plain%n

# a function of math that is replaced
top: old%n = math.sqrt
use: h = h * math.sqrt(4.0)
between: math.sqrt = lambda v: v
after: math.sqrt = old%n

# a method of a layer of torch that is replaced
init: self.act%n = nn.Tanhshrink()
top: old%n = nn.Tanhshrink.forward
use: h = self.act%n(h)
between: nn.Tanhshrink.forward = lambda self, t: t * 0.5
after:
    if i == CALLS - 1:
        nn.Tanhshrink.forward = old%n

# an attribute of a class of torch
top: nn.Module.by%n = %f
use: h = h * model.by%n
between: nn.Module.by%n = %v

# a method that tensors get
top: torch.Tensor.scaled%n = lambda self: self * %f
use: h = h.scaled%n()
between: torch.Tensor.scaled%n = lambda self: self * %v

# an iterator that ends (may be refused)
make: $it = iter([0.5, 0.7])
use:
    for k in $it:
        h = h * k

# a map (may be refused)
make: $it = map(float, [0.5, 0.7])
use: h = h * (1 + sum($it))

# a map that is made anew (may be refused)
make: $it = map(float, [0.5, 0.7])
use: h = h * (1 + sum($it))
always: $it = map(float, [0.5, %f])

# pairs that are made anew (may be refused)
make: $it = zip([0.5, 0.7], (1, 2))
use:
    for a, b in $it:
        h = h * a + b
always: $it = zip([0.5, %f], (1, 2))

# a generator that is made anew (may be refused)
make: $it = (k for k in (0.5, 0.7))
use: h = h * (1 + sum($it))
always: $it = (k for k in (0.5, %f))

# a property that the step sets
top:
    class Owner%n:
        kept = 0.0
        def __init__(self):
            self._x = torch.zeros(WIDTH)
        @property
        def x(self):
            return self._x * 2
        @x.setter
        def x(self, value):
            self._x = value * 0.5
make: $o = Owner%n()
use:
    h = h + $o.x
    $o.x = 0.1 * h.detach().mean(0)

# a property that sets a class
top:
    class Owner%n:
        kept = torch.zeros(WIDTH)
        @property
        def x(self):
            return type(self).kept
        @x.setter
        def x(self, value):
            type(self).kept = value
make: $o = Owner%n()
use:
    h = h + $o.x
    $o.x = 0.1 * h.detach().mean(0)

# a property that counts (may be refused)
top:
    class Owner%n:
        def __init__(self):
            self.count = 0
        @property
        def x(self):
            self.count += 1
            return self.count
make: $o = Owner%n()
use: h = h * (1 + 0.1 * $o.x)

# an attribute that is set by __setattr__
top:
    class Store%n:
        def __init__(self):
            object.__setattr__(self, "table", {})
        def __setattr__(self, name, value):
            self.table[name] = value
        def __getattr__(self, name):
            try:
                return self.table[name]
            except KeyError:
                raise AttributeError(name) from None
make: $o = Store%n()
make: $o.mean = torch.zeros(WIDTH)
use:
    h = h + $o.mean
    $o.mean = 0.1 * h.detach().mean(0)

# attributes in a table of a descriptor
top:
    class Typed%n:
        def __init__(self):
            self.values = weakref.WeakKeyDictionary()
        def __get__(self, one, owner=None):
            return self if one is None else self.values.get(one, 0.5)
        def __set__(self, one, value):
            self.values[one] = value
    class Owner%n:
        level = Typed%n()
make: $o = Owner%n()
use: h = h * $o.level
between: $o.level = %v

# a dataclass with slots
top:
    @dataclasses.dataclass(slots=True)
    class Config%n:
        a: float = %f
make: $c = Config%n()
use: h = h * $c.a
between: $c.a = %v

# a dataclass of tensors that is replaced
top:
    @dataclasses.dataclass(frozen=True)
    class Kept%n:
        a: torch.Tensor
        b: float = 0.5
make: $c = Kept%n(torch.zeros(WIDTH))
use:
    h = h + $c.a * $c.b
    $c = dataclasses.replace($c, a=0.1 * h.detach().mean(0))

# fields of a dataclass
top:
    @dataclasses.dataclass
    class Config%n:
        a: float = %f
        b: float = 1.5
make: $c = Config%n()
use:
    for field in dataclasses.fields($c):
        h = h * getattr($c, field.name)
between: $c.b = %v

# a dataclass as a dictionary
top:
    @dataclasses.dataclass
    class Config%n:
        a: float = %f
        b: dict = dataclasses.field(default_factory=lambda: {"x": 0.5})
make: $c = Config%n()
use: h = h * dataclasses.asdict($c)["b"]["x"]
between: $c.b["x"] = %v

# a class that keeps its objects
top:
    class Plugin%n:
        registry = {}
        def __init_subclass__(cls, by=1.0):
            Plugin%n.registry[cls.__name__] = by
    class One%n(Plugin%n, by=0.5):
        pass
use: h = h * sum(Plugin%n.registry.values())
between: type("Two%n", (Plugin%n,), {}, by=%f)

# classes that have come since
top:
    class Base%n:
        by = %f
    kept%n = []
use:
    for one in Base%n.__subclasses__():
        h = h * one.by
between: kept%n.append(type("Two%n", (Base%n,), {"by": 0.7}))

# bases of a class
top:
    class One%n:
        by = %f
    class Two%n:
        by = 1.5
    class Made%n(One%n):
        pass
make: $o = Made%n()
use: h = h * $o.by
between: Made%n.__bases__ = (Two%n,)

# a coroutine
top:
    level%n = [%f]
    async def faded%n(t):
        return t * level%n[0]
    def finished%n(made):
        try:
            made.send(None)
        except StopIteration as end:
            return end.value
use: h = finished%n(faded%n(h))
between: level%n[0] = %v

# a recursion
top:
    depth%n = [2]
    def deeper%n(t, left):
        return t if left == 0 else deeper%n(t.sin() * 1.1, left - 1)
use: h = deeper%n(h, depth%n[0])
between: depth%n[0] = 3

# an exit stack
top:
    marks%n = {"by": %f}
    class Entered%n:
        def __enter__(self):
            self.by = marks%n["by"]
            return self
        def __exit__(self, *args):
            return None
use:
    with contextlib.ExitStack() as stack:
        h = h * stack.enter_context(Entered%n()).by
between: marks%n["by"] = %v

# a lambda that calls itself by name
top: curve%n = lambda t, n=2: t if n == 0 else curve%n(t * %f, n - 1)
use: h = curve%n(h)
between: curve%n.__defaults__ = (1,)

# a closure in a list
top:
    def maker%n(by):
        def made(t):
            return t * by
        def put(value):
            nonlocal by
            by = value
        return made, put
    pairs%n = [maker%n(%f), maker%n(0.5)]
use:
    for f, _ in pairs%n:
        h = f(h)
between: pairs%n[1][1](%v)

# the zero's sign
make: $z = 0.0
use: h = h * math.copysign(0.5, $z)
between: $z = -0.0

# a number that becomes whole
make: $z = 2.0
use: h = h + torch.full((WIDTH,), $z).sum().to(h.dtype) + isinstance($z, int)
between: $z = 2

# a flag that becomes a number
make: $z = True
use: h = h * 2 if $z is True else h.sin()
between: $z = 1

# a complex number
make: $z = complex(0.5, 0.5)
use: h = h * abs($z) + $z.imag
between: $z = complex(%v, 0.5)

# a large number
make: $z = 10**20
use: h = h * ($z / 10**20)
between: $z = 2 * 10**20

# a cache of tensors of functools
top:
    @functools.cache
    def table%n(k, *, by=1.0):
        return torch.arange(k) * LEVEL%n[0] * by
    LEVEL%n = [%f]
use: h = h * (1 + table%n(WIDTH, by=0.5))
between: LEVEL%n[0] = %v
always:
    if i == 3:
        table%n.cache_clear()

# tensors by several keys
make: $t = {}
use:
    if ("scale", h.dtype, nn.Linear) not in $t:
        $t["scale", h.dtype, nn.Linear] = torch.linspace(0.5, 1.5, WIDTH)
    h = h * $t["scale", h.dtype, nn.Linear]
between: $t.clear()

# a decimal number
top: import decimal
make: $z = decimal.Decimal("0.5")
use: h = h * float($z)
between: $z = decimal.Decimal("0.7")

# a context of decimal numbers
top: import decimal
use: h = h * float(decimal.Decimal(1) / decimal.Decimal(3))
between: decimal.getcontext().prec = 3
after: decimal.getcontext().prec = 28

# layers in a sequence, of which one is set
init: self.seq%n = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
use: h = h + self.seq%n(h)
between: self.seq%n[1] = nn.Sigmoid()

# layers in a sequence, part of which is used
init:
    self.seq%n = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    self.upto%n = 2
use: h = h + self.seq%n[: self.upto%n](h)
between: self.upto%n = 3

# a sequence that gets a layer
init: self.seq%n = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
use: h = h + self.seq%n(h)
between:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        self.seq%n.append(nn.Linear(WIDTH, WIDTH))

# a sequence that loses a layer
init: self.seq%n = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
use: h = h + self.seq%n(h)
between: self.seq%n.pop(2) if len(self.seq%n) > 1 else None

# a sequence that gets a layer at its start
init: self.seq%n = nn.Sequential(nn.Linear(WIDTH, WIDTH))
use: h = h + self.seq%n(h)
between: self.seq%n.insert(0, nn.Tanh())

# a layer under another name
init: self.one%n, self.two%n = nn.Linear(WIDTH, WIDTH), None
use: h = h + (self.one%n if self.two%n is None else self.two%n)(h)
between: self.two%n = self.one%n

# a layer that is deleted
init: self.one%n = nn.Linear(WIDTH, WIDTH)
use: h = h + self.one%n(h) if hasattr(self, "one%n") else h
between: self.__dict__["_modules"].pop("one%n", None)

# a module by its path
init: self.deep%n = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(WIDTH, WIDTH)})})
use: h = h + self.deep%n.get_submodule("a.b")(h)
between: self.deep%n["a"]["b"].bias.data.mul_(%f)

# all parameters by name
init: self.lin%n = nn.Linear(WIDTH, WIDTH)
use: h = h + sum(p.sum() for name, p in self.lin%n.named_parameters() if "bias" not in name)
between: self.lin%n.register_parameter("more", nn.Parameter(torch.ones(2)))

# buffers by name
init: self.register_buffer("b%n", torch.full((WIDTH,), 0.5))
use: h = h * sum(b.sum() for name, b in self.named_buffers() if name == "b%n")
between: self.get_buffer("b%n").mul_(%f)

# a buffer that is registered anew
init: self.register_buffer("b%n", torch.full((WIDTH,), 0.5))
use: h = h * self.b%n
between:
    del self.b%n
    self.register_buffer("b%n", torch.full((WIDTH,), %v))

# a buffer that becomes an attribute
init: self.register_buffer("b%n", torch.full((WIDTH,), 0.5))
use: h = h * self.b%n
between:
    if "b%n" in self._buffers:
        self.__dict__["b%n"] = self._buffers.pop("b%n") * 0.5

# a parameter that becomes a buffer
init: self.w%n = nn.Parameter(torch.full((WIDTH,), 0.5))
use: h = h * self.w%n
between:
    if "w%n" in self._parameters:
        held%n = self._parameters.pop("w%n").detach().clone()
        self.register_buffer("w%n", held%n)

# a parameter that is taken away and put back
init: self.w%n = nn.Parameter(torch.full((WIDTH,), 0.5))
use: h = h * self.w%n if "w%n" in self._parameters else h
top: put%n = []
between:
    if put%n:
        self.register_parameter("w%n", put%n.pop())
    else:
        put%n.append(self._parameters.pop("w%n"))

# a buffer in another precision
init: self.register_buffer("b%n", torch.full((WIDTH,), 0.5))
use: h = h * self.b%n.to(h.dtype)
between: self.b%n = self.b%n.to(torch.float32)

# a weight norm that is taken off (may be refused)
init: self.lin%n = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
use: h = h + self.lin%n(h)
between:
    if torch.nn.utils.parametrize.is_parametrized(self.lin%n):
        torch.nn.utils.parametrize.remove_parametrizations(self.lin%n, "weight")

# a weight norm that comes
init: self.lin%n = nn.Linear(WIDTH, WIDTH)
use: h = h + self.lin%n(h)
between:
    if not torch.nn.utils.parametrize.is_parametrized(self.lin%n):
        torch.nn.utils.parametrizations.weight_norm(self.lin%n)

# a pruning that is made permanent (may be refused)
init:
    self.lin%n = nn.Linear(WIDTH, WIDTH)
    nn.utils.prune.random_unstructured(self.lin%n, "weight", 0.3)
use: h = h + self.lin%n(h)
between:
    if nn.utils.prune.is_pruned(self.lin%n):
        nn.utils.prune.remove(self.lin%n, "weight")

# a pruning that comes (may be refused)
init: self.lin%n = nn.Linear(WIDTH, WIDTH)
use: h = h + self.lin%n(h)
between:
    if not nn.utils.prune.is_pruned(self.lin%n):
        nn.utils.prune.custom_from_mask(self.lin%n, "weight", torch.eye(WIDTH))

# a function applied to all modules
top:
    def halve%n(module):
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(%f)
between: model.apply(halve%n)

# a model that is frozen and thaws
between: model.first.requires_grad_(not model.first.weight.requires_grad)

# a model that is loaded by exchange
between: model.load_state_dict({k: v.clone() * 0.9 for k, v in model.state_dict().items()}, assign=True)

# a model that is pickled
top: import pickle
between: model = pickle.loads(pickle.dumps(model)); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# a shallow copy of the model
between: model = copy.copy(model)

# an optimizer that is copied with its model
between: model, optimizer = copy.deepcopy((model, optimizer))

# a model's forward of its class
top: old%n = []
always:
    if not old%n:
        old%n.append(type(model).forward)
between: type(model).forward = lambda self, t: old%n[0](self, t) * 0.9

# a model's forward of its own
top: old%n = []
always:
    if not old%n:
        old%n.append(model.forward)
between: model.forward = lambda t: old%n[0](t) * 0.9

# a block's forward that is wrapped
top: old%n = []
always:
    if not old%n:
        old%n.append(model.block.forward)
between: model.block.forward = functools.partial(lambda f, t: f(t) * 0.9, old%n[0])

# a call of a class
between: type(model).__call__ = lambda self, *args: nn.Module.__call__(self, *args) * 0.9

# a step of the optimizer that is wrapped
top: made%n = []
always:
    if not any(o is optimizer for o in made%n):
        made%n.append(optimizer)
between:
    def stepped%n(*args, one=optimizer, **kwargs):
        with torch.no_grad():
            for group in one.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)
        return type(one).step(one, *args, **kwargs)
    optimizer.step = stepped%n

# groups in another order
between: optimizer.param_groups.reverse()

# groups that differ in another order
between:
    if len(optimizer.param_groups) == 1 and len(optimizer.param_groups[0]["params"]) % 2 == 0:
        params = optimizer.param_groups[0]["params"]
        half = params[len(params) // 2:]
        del params[len(params) // 2:]
        optimizer.add_param_group({"params": half, "lr": 0.3, "weight_decay": 0.1})
always:
    if len(optimizer.param_groups) == 2 and i == 3:
        optimizer.param_groups.reverse()

# parameters of a group in another order
between: optimizer.param_groups[0]["params"].reverse()

# a parameter that moves to another group
between:
    if len(optimizer.param_groups) == 1:
        moved%n = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [moved%n], "lr": 0.02})

# a direction
between:
    for group in optimizer.param_groups:
        if "maximize" in group:
            group["maximize"] = not group["maximize"]

# amsgrad from now on
between:
    for group in optimizer.param_groups:
        if "amsgrad" in group:
            group["amsgrad"] = False

# nesterov from now on
between:
    for group in optimizer.param_groups:
        if group.get("momentum"):
            group["nesterov"] = not group["nesterov"] and group["dampening"] == 0

# dampening from now on
between:
    for group in optimizer.param_groups:
        if group.get("momentum") and not group.get("nesterov") and "dampening" in group:
            group["dampening"] = %f

# momentum from now on
between:
    for group in optimizer.param_groups:
        if "momentum" in group and not group.get("nesterov"):
            group["momentum"] = %f

# an eps of the optimizer
between:
    for group in optimizer.param_groups:
        if "eps" in group:
            group["eps"] = 1e-3

# a kind of loop of the optimizer
between:
    for group in optimizer.param_groups:
        group["foreach"] = not group.get("foreach")

# a rate in a tensor from now on
between:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]) * 0.5) if not group.get("foreach") else group["lr"]

# base rates of a schedule
top: schedule%n = None
always:
    if schedule%n is None or schedule%n.optimizer is not optimizer:
        schedule%n = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
between: schedule%n.gamma = 0.9; schedule%n.step_size = 1
after: schedule%n.step()

# a schedule that reads a global
top:
    schedule%n = None
    fade%n = 0.9
always:
    if schedule%n is None or schedule%n.optimizer is not optimizer:
        schedule%n = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: fade%n**e)
between: fade%n = %f
after: schedule%n.step()

# a schedule that is loaded
top:
    schedule%n = None
    kept%n = []
always:
    if schedule%n is None or schedule%n.optimizer is not optimizer:
        schedule%n = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    kept%n.append(schedule%n.state_dict())
between: schedule%n.load_state_dict(kept%n[0])
after: schedule%n.step()

# restarts
top: schedule%n = None
always:
    if schedule%n is None or schedule%n.optimizer is not optimizer:
        schedule%n = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
after: schedule%n.step(i + 0.5)

# cyclic momentum
top: schedule%n = None
always:
    if schedule%n is None or schedule%n.optimizer is not optimizer:
        schedule%n = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False)
after: schedule%n.step()

# weights in one flat tensor
top: flat%n = torch.linspace(-1, 1, WIDTH * 2)
init:
    self.a%n = nn.Parameter(torch.zeros(WIDTH))
    self.b%n = nn.Parameter(torch.zeros(WIDTH))
    self.a%n.data, self.b%n.data = flat%n[:WIDTH], flat%n[WIDTH:]
use: h = h * self.a%n + self.b%n
between: flat%n.mul_(%v)

# memory that a weight gets
between: model.head.bias.data = torch.full((CLASSES,), %v)

# memory that is set
between: model.head.bias.data.set_(torch.full((CLASSES,), %v))

# several weights at once
between:
    with torch.no_grad():
        torch._foreach_mul_([*model.parameters()], 0.9)

# weights by lerp, several at once
top: shadow%n = []
always:
    if not shadow%n:
        shadow%n.extend(p.detach().clone() for p in model.head.parameters())
after:
    with torch.no_grad():
        torch._foreach_lerp_(shadow%n, [*model.head.parameters()], 0.1)

# gradients outside, several at once
after: [p.grad.zero_() for p in model.parameters() if p.grad is not None]

# a clip outside
always: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

# a distribution of torch
make: $d = torch.distributions.Normal(torch.zeros(WIDTH), torch.ones(WIDTH), validate_args=False)
use: h = h + 0.1 * $d.log_prob(h)
between: $d.loc.add_(0.5)

# a distribution of torch that gets another tensor
make: $d = torch.distributions.Normal(torch.zeros(WIDTH), torch.ones(WIDTH), validate_args=False)
use: h = h + 0.1 * $d.log_prob(h)
between: $d.loc = torch.full((WIDTH,), %v)

# a distribution of torch over a parameter
init:
    self.mu%n = nn.Parameter(torch.zeros(WIDTH))
    self.prior%n = torch.distributions.Normal(self.mu%n, 1.0, validate_args=False)
use: h = h + 0.1 * self.prior%n.log_prob(h)

# a data set of torch
top: from torch.utils.data import TensorDataset
make: $d = TensorDataset(torch.full((3, WIDTH), 0.5))
use: h = h * $d[1][0]
between: $d.tensors[0].mul_(%f)

# gradients of the batch (may be refused)
top: seen%n = []
always: x.requires_grad_()
after: seen%n.append(x.grad)

# a batch that is taken from a larger one
always: x = torch.cat([x, x])[: len(x)]

# a batch that is not in rows
always: x = x.t().contiguous().t()

# a batch that is expanded
always: x = x[:1].expand(len(x), -1)

# a call without gradients
make: $on = True
use: h = h.sin() if torch.is_grad_enabled() else h
between: $on = torch.is_grad_enabled()

# autocast around a call
use: h = h + 0.01 * (h.float() @ torch.ones(WIDTH, WIDTH, dtype=torch.float32)).double()
between: torch.set_autocast_enabled("cpu", True); torch.set_autocast_dtype("cpu", torch.bfloat16)
after: torch.set_autocast_enabled("cpu", False)

# a seed that is set
always: torch.manual_seed(i); random.seed(i); np.random.seed(i)
use: h = F.dropout(h, 0.0)

# dropout of everything
init: self.drop%n = nn.Dropout(1.0)
use: h = h + self.drop%n(h)
between: self.drop%n.p = 0.0

# an exception of the step
make: $bad = False
use:
    try:
        if $bad:
            raise ValueError("bad")
        h = h * 2
    except ValueError as error:
        h = h * len(error.args)
between: $bad = not $bad

# an assertion
make: $limit = 10
use:
    assert len(h) < $limit, "too long"
    h = h * $limit
between: $limit = 20

# a function with variables of its own
top:
    def counted%n(t, _cache={}):
        if "by" not in _cache:
            _cache["by"] = %f
        return t * _cache["by"]
use: h = counted%n(h)
between: counted%n.__defaults__[0]["by"] = %v

# a table of functions by a decorator
top:
    acts%n = {}
    def act%n(f):
        acts%n[f.__name__] = f
        return f
    @act%n
    def one(t):
        return t.sin()
make: $which = "one"
use: h = acts%n[$which](h)
between:
    @act%n
    def one(t):
        return t.cos()

# a function whose name is another
use: h = helper_of%n(h)
top:
    def first%n(t):
        return t * 0.5
    def second%n(t):
        return t.sin()
    helper_of%n = first%n
between: helper_of%n = second%n

# a function of a function of functools
top:
    by%n = {"v": %f}
    def inner%n(t, k):
        return t * k * by%n["v"]
make: $f = functools.partial(functools.partial(inner%n), k=0.5)
use: h = functools.reduce(lambda a, f: f(a), [$f, $f], h)
between: by%n["v"] = %v

# a comparison by a key of functools
make: $t = [0.9, 0.5]
use: h = h * sorted($t, key=functools.cmp_to_key(lambda a, b: a - b))[0]
between: $t[1] = %v

# a method that is bound to another
top:
    class Bound%n:
        def __init__(self, a):
            self.a = a
        def scaled(self, t):
            return t * self.a
make: $one = Bound%n(%f)
make: $m = types.MethodType(Bound%n.scaled, $one)
use: h = $m(h)
between: $one.a = %v

# a slot that is deleted
make: $o = SimpleNamespace(a=%f)
use: h = h * getattr($o, "a", 1.5)
between: $o.__dict__.pop("a", None)

# a list that is sorted
make: $t = [0.9, 0.5, 0.7]
use:
    for k in $t:
        h = (h * k).sin()
between: $t.sort()

# a list that is filled anew
make: $t = [0.9, 0.5, 0.7]
use:
    for k in $t:
        h = (h * k).sin()
between: $t[:] = [0.5, %v]

# a list that is emptied
make: $t = [0.9, 0.5]
use:
    for k in $t:
        h = (h * k).sin()
between: $t.clear()

# a deque that is rotated
make: $t = collections.deque([0.9, 0.5, 0.7])
use:
    for k in $t:
        h = (h * k).sin()
between: $t.rotate(1)

# a dictionary of dictionaries
make: $t = collections.defaultdict(lambda: collections.defaultdict(lambda: %f))
use: h = h * $t["a"]["b"]
between: $t["a"]["b"] = %v

# nothing of a set
make: $t = frozenset({0.5})
use: h = h * sum($t)
between: $t = frozenset({0.5, %v})

# bytes
make: $t = b"ab"
use: h = h * $t[0] / 97
between: $t = b"bb"

# a type alias
make: $t = list[int]
use: h = h * len($t.__args__)
between: $t = dict[str, int]

# a pattern
top: import re
make: $t = re.compile("a+")
use: h = h * len($t.match("aab")[0])
between: $t = re.compile("a")

# tensors in a namespace of the environment of a function
top:
    def table%n():
        return {"w": table%n.w}
    table%n.w = torch.ones(WIDTH)
use: h = h * table%n()["w"]
between: table%n.w = torch.full((WIDTH,), %v)

# a tensor in a class of tensors
make: $w = torch.ones(WIDTH)
use: h = h * $w
between: $w.data = torch.full((WIDTH,), %v)

# a tensor that is resized
make: $w = torch.ones(2)
use: h = h * $w.sum()
between: $w = $w.resize_(3).fill_(%v)

# a tensor without memory of its own
make: $w = torch.zeros(1).expand(WIDTH)
use: h = h + $w
between: $w = torch.full((1,), %v).expand(WIDTH)

# a tensor of bits
make: $w = torch.ones(WIDTH, dtype=torch.bool)
use: h = torch.where($w, h, 0.5 * h)
between: $w[1] = False

# a number of a tensor that is kept outside
make: $w = torch.ones(WIDTH)
make: $n = 1.0
use: h = h * $w * $n
between:
    $w.mul_(0.9)
    $n = $w.sum().item()
"""
