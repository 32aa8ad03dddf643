"""The options of a run, each declared once: its flag and help, its environment variable, its default and its check.

``actorflow run`` makes its command line of these declarations, ``Settings`` writes and reads the environment of a rank
with them, and ``--on ray`` takes from them which options each rank's launcher is given, too.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actorflow.rendezvous.engines import BY_OPTION
from actorflow_compiler.core.errors import ClusterError

_SECONDS = re.compile(r"\d+(\.\d*)?")
SUSPECT = 5.0  # seconds of silence after which a rank is named
DAY = 86400.0  # seconds; transfers of tensors wait no longer


class ValueKind(enum.StrEnum):
    """The kind of an option's value, which determines its type on the command line and its text in a variable."""

    SWITCH = "switch"  # --insecure; in a variable 0 or 1
    TOGGLE = "toggle"  # --local/--no-local; in a variable 0 or 1
    COUNT = "count"  # an integer from 1
    NODES = "nodes"  # "4", or "2:4"
    NUMBER = "number"  # an integer from 0
    PORT = "port"
    SECONDS = "seconds"
    TEXT = "text"
    CHOICE = "choice"
    FILE = "file"  # one that exists
    FOLDER = "folder"  # one that can be written to
    NAMES = "names"  # a set; in a variable with commas between them
    LIVE_MODE = "live mode"
    DEVICE_TYPE = "device type"


@dataclass(frozen=True, slots=True)
class NodeCount:
    """How many nodes a run has: as many as ``most``, and where some are missing, no fewer than ``least``."""

    least: int
    most: int

    @classmethod
    def from_text(cls, text: str) -> NodeCount:
        """The count in "4" or "2:4"; raises ValueError for another text."""
        found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
        if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            raise ValueError(f"{text!r} was found; a number from 1 on, or MIN:MAX such as 2:4, was expected")
        return cls(int(found[1]), int(found[2] or found[1]))

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


class LiveMode(enum.StrEnum):
    """What the terminal shows during a run."""

    AUTO = ""  # a progress bar, if the terminal supports it
    BAR = "bar"
    RANKS = "live"  # a bar and a row for each rank
    NONE = "none"


class DeviceType(enum.StrEnum):
    """What ranks compute on that no placement names."""

    AUTO = ""  # a GPU, if there is one
    CPU = "cpu"
    CUDA = "cuda"


_FROM_TEXT: dict[ValueKind, Callable[[str], Any]] = {
    ValueKind.COUNT: int,
    ValueKind.NODES: int,  # in a variable for ranks: those of the attempt
    ValueKind.NUMBER: int,
    ValueKind.PORT: int,
    ValueKind.SECONDS: float,
    ValueKind.NAMES: lambda text: frozenset(filter(None, text.split(","))),
    ValueKind.LIVE_MODE: LiveMode,
    ValueKind.DEVICE_TYPE: DeviceType,
}


@dataclass(frozen=True, slots=True)
class LaunchOption:
    """One option of a run."""

    name: str  # of the command's parameter, from which the flag is made
    kind: ValueKind
    help: str = ""  # empty: the command line does not take it
    default: Any = None
    show_default: bool = False
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    also: str = ""  # another flag for it
    above: float = 0.0  # of seconds: the lower bound, which is no valid value itself
    most: float | None = None  # of seconds: the largest valid value
    variable: str = ""  # the environment variable; empty: it has none
    user_variable: bool = False  # without the flag, the command line takes the variable's value
    for_ranks: bool = False  # the launcher sets the variable for its ranks, which read it into ``Settings``
    setting: str = ""  # its field in ``Settings``, if the name differs
    fits: Callable[[str], bool] | None = None  # for a variable that every process reads: whether a text is valid
    expected: str = ""  # the valid texts, for the error
    by_driver: bool = False  # with --on ray, used by the process that starts the run, not by the ranks' launchers

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def field(self) -> str:
        """Its field in ``Settings``."""
        return self.setting or self.name

    def to_text(self, value: Any) -> str:
        """The value as text for its environment variable."""
        if isinstance(value, bool):
            return str(int(value))
        return ",".join(sorted(value)) if self.kind is ValueKind.NAMES else str(value)

    def from_text(self, text: str) -> Any:
        """The value of the variable's text; raises ValueError for an invalid one."""
        if self.kind is ValueKind.SWITCH:
            return text == "1"
        if self.kind is ValueKind.TOGGLE:
            return bool(int(text))
        return _FROM_TEXT.get(self.kind, str)(text)

    def read(self, environ: Mapping[str, str]) -> Any:
        """The value in the environment, or the default; raises ValueError for an invalid text."""
        return self.from_text(environ[self.variable]) if self.variable in environ else self.default

    def words(self, value: Any) -> list[str]:
        """The option with this value as words of a command line."""
        if self.kind is ValueKind.SWITCH:
            return [self.flag] if value else []
        if self.kind is ValueKind.TOGGLE:
            return [self.flag if value else f"--no-{self.flag[2:]}"]
        return [self.flag, str(value)]


def _positive_seconds(text: str) -> bool:
    return _SECONDS.fullmatch(text) is not None and float(text) > 0


def _fits_fan_out(text: str) -> bool:
    return re.fullmatch(r"\d{1,9}", text) is not None and int(text) >= 1


def _fits_lost_after(text: str) -> bool:
    return _SECONDS.fullmatch(text) is not None and SUSPECT < float(text) <= DAY


_K = ValueKind
TOKEN = LaunchOption("token", _K.TEXT, variable="ACTORFLOW_TOKEN", for_ranks=True)  # the secret that all ranks share
DEVICES = LaunchOption(
    "devices",
    _K.COUNT,
    "Devices on each node.  [default: all GPUs, else 1]",
    variable="ACTORFLOW_DEVICES",
    for_ranks=True,
    by_driver=True,
)
NNODES = LaunchOption(
    "nnodes",
    _K.NODES,
    "Nodes in the run; MIN:MAX goes on with fewer where some are lost, and takes them in again when they come back.  "
    "[default: 1]",
    metavar="N|MIN:MAX",
    also="--nodes",
    variable="ACTORFLOW_NNODES",
    for_ranks=True,
    by_driver=True,
)
NODE_RANK = LaunchOption(
    "node_rank",
    _K.NUMBER,
    "Which of them this one is.  [default: 0]",
    variable="ACTORFLOW_NODE_RANK",
    for_ranks=True,
    setting="node",
)
MASTER_ADDR = LaunchOption("master_addr", _K.TEXT, "Name or IP address of node 0, as the other nodes reach it.")
MASTER_PORT = LaunchOption("master_port", _K.PORT, "A free port on node 0, the same on every node.")
CTRL_PORT = LaunchOption("ctrl_port", _K.PORT, "Port of the control server.  [default: the master port]")
JOIN_TIMEOUT = LaunchOption(
    "join_timeout",
    _K.SECONDS,
    "Seconds to wait for all nodes; then the missing ones are named.",
    default=300.0,
    show_default=True,
    variable="ACTORFLOW_JOIN_TIMEOUT",
    user_variable=True,
    for_ranks=True,
)
MAX_RESTARTS = LaunchOption(
    "max_restarts",
    _K.NUMBER,
    "How often all ranks start again when one fails; a script with a Keeper then goes on from its last checkpoint.",
    default=0,
    show_default=True,
    variable="ACTORFLOW_MAX_RESTARTS",
    for_ranks=True,
    by_driver=True,
)
LOST_AFTER = LaunchOption(
    "lost_after",
    _K.SECONDS,
    f"Seconds after which a rank that does not answer is lost, more than {SUSPECT:g}, the same on every node.  "
    "[default: 30 with several nodes, else 15]",
    above=SUSPECT,
    most=DAY,
    variable="ACTORFLOW_LOST_AFTER",
    user_variable=True,
    for_ranks=True,
    fits=_fits_lost_after,
    expected=f"a number of seconds above {SUSPECT:g}, up to {DAY:g},",
)
TOKEN_FILE = LaunchOption(
    "token_file",
    _K.FILE,
    f"File with the secret that all nodes share.  [default: {TOKEN.variable}]",
    by_driver=True,
)
INSECURE = LaunchOption(
    "insecure",
    _K.SWITCH,
    "Several nodes without a token: anyone who reaches the port can join.",
    default=False,
    variable="ACTORFLOW_INSECURE",
    user_variable=True,
    by_driver=True,
)
TLS_CA = LaunchOption(
    "tls_ca",
    _K.FILE,
    "File with the certificate of the run's CA; between nodes, gRPC then uses TLS, and refuses who has no certificate "
    "of it.",
    variable="ACTORFLOW_TLS_CA",
    user_variable=True,
    for_ranks=True,
)
TLS_CERT = LaunchOption(
    "tls_cert",
    _K.FILE,
    "File with this node's certificate, which that CA has signed.",
    variable="ACTORFLOW_TLS_CERT",
    user_variable=True,
    for_ranks=True,
)
TLS_KEY = LaunchOption(
    "tls_key",
    _K.FILE,
    "File with its private key, which only you can read.",
    variable="ACTORFLOW_TLS_KEY",
    user_variable=True,
    for_ranks=True,
)
ON = LaunchOption(
    "on",
    _K.CHOICE,
    "What has started this process and says where it is (auto: whichever did; none: the flags alone), or, with "
    "ray, starts the run on a Ray cluster.",
    default="auto",
    show_default=True,
    choices=("auto", "none", *BY_OPTION),
    by_driver=True,
)
INTERFACE = LaunchOption(
    "interface",
    _K.TEXT,
    "Network card that leads to the other nodes.  [default: the one by which node 0 is reached]",
    metavar="NAME",
    variable="ACTORFLOW_INTERFACE",
    user_variable=True,
    for_ranks=True,
)
LOG_DIR = LaunchOption(
    "log_dir",
    _K.FOLDER,
    "For other ranks' output.  [default: a new one, which is removed when the run has gone well]",
    variable="ACTORFLOW_LOG_DIR",
    for_ranks=True,
)
LIVE = LaunchOption(
    "live", _K.SWITCH, "Show, while it runs, what each rank does, how busy it is, and its waits.", default=False
)
BAR = LaunchOption(
    "bar",
    _K.TOGGLE,
    "Show steps, speed and loss while it runs.  [default: on a terminal, unless the script draws bars itself]",
)
TRACE = LaunchOption(
    "trace",
    _K.FOLDER,
    "Folder for what each rank did and when, for `actorflow trace` and Perfetto, and in which order its actors "
    "fired: 0F0 0F1 0B0 …",
    variable="ACTORFLOW_TRACE",
    for_ranks=True,
)
AUTO = LaunchOption(
    "auto",
    _K.SWITCH,
    "Choose the mesh, pipeline stages, layouts, ZeRO and micro-batches of jobs that do not say them, as "
    'parallel="auto" and micro_batches="auto" do.',
    default=False,
    variable="ACTORFLOW_AUTO",
    for_ranks=True,
)
LOCAL = LaunchOption(
    "local",
    _K.TOGGLE,
    "Between ranks of one machine, use Unix sockets and shared memory, or the network as between machines.  "
    "[default: local]",
    default=True,
    variable="ACTORFLOW_LOCAL",
    user_variable=True,
    for_ranks=True,
)
FORK = LaunchOption(
    "fork",
    _K.TOGGLE,
    "Ranks are forks of one process of this machine, which has imported torch for all of them, or each is a new "
    "process that imports it itself.  [default: fork]",
    default=True,
    variable="ACTORFLOW_FORK",
    user_variable=True,
)
DEVICE_TYPE = LaunchOption(
    "device_type",
    _K.DEVICE_TYPE,
    "What a device is where the script's placements do not say.  [default: cuda where there is one, else cpu]",
    choices=(DeviceType.CPU.value, DeviceType.CUDA.value),
    variable="ACTORFLOW_DEVICE_TYPE",
    user_variable=True,
    for_ranks=True,
    fits=lambda text: text in (DeviceType.CPU, DeviceType.CUDA),
    expected="cpu or cuda",
)
OVERSUBSCRIBE = LaunchOption(
    "oversubscribe",
    _K.SWITCH,
    "Let several ranks share a GPU; what they exchange then goes through host memory.",
    default=False,
    variable="ACTORFLOW_OVERSUBSCRIBE",
    user_variable=True,
    for_ranks=True,
    fits=lambda text: text in ("0", "1"),
    expected="0 or 1",
)
NCCL_TIMEOUT = LaunchOption(  # after which a transfer that has not ended ends the run
    "nccl_timeout",
    _K.SECONDS,
    default=600.0,
    variable="ACTORFLOW_NCCL_TIMEOUT",
    fits=_positive_seconds,
    expected="a number of seconds",
)
FAN_OUT = LaunchOption(  # of the tree of ranks over which a run joins, agrees and hears of plans and failures
    "fan_out",
    _K.COUNT,
    default=16,
    variable="ACTORFLOW_FAN_OUT",
    fits=_fits_fan_out,
    expected="a number from 1 to 999999999",
)

RUN_OPTIONS = (  # of ``actorflow run``, in the order of its help
    DEVICES,
    NNODES,
    NODE_RANK,
    MASTER_ADDR,
    MASTER_PORT,
    CTRL_PORT,
    JOIN_TIMEOUT,
    MAX_RESTARTS,
    LOST_AFTER,
    TOKEN_FILE,
    INSECURE,
    TLS_CA,
    TLS_CERT,
    TLS_KEY,
    ON,
    INTERFACE,
    LOG_DIR,
    AUTO,
    LIVE,
    BAR,
    TRACE,
    LOCAL,
    FORK,
    DEVICE_TYPE,
    OVERSUBSCRIBE,
)

TASK_VARIABLE = "ACTORFLOW_TASK"  # the local rank of the only rank of a launcher, where a node has several launchers
_FOR_RANKS_ALONE = (  # variables from a launcher to its ranks, without an option
    TOKEN,
    LaunchOption("live", _K.LIVE_MODE, variable="ACTORFLOW_LIVE", for_ranks=True),
    LaunchOption("tasks", _K.COUNT, variable="ACTORFLOW_TASKS", for_ranks=True),
    LaunchOption("own_cores", _K.SWITCH, variable="ACTORFLOW_OWN_CORES", for_ranks=True),
    LaunchOption("given", _K.NAMES, variable="ACTORFLOW_GIVEN", for_ranks=True),
    LaunchOption("reserved_port", _K.SWITCH, variable="ACTORFLOW_RESERVED_PORT", for_ranks=True),
    LaunchOption("most_nodes", _K.NUMBER, default=0, variable="ACTORFLOW_MOST_NODES", for_ranks=True),
    LaunchOption("meeting_port", _K.PORT, default=0, variable="ACTORFLOW_MEETING_PORT", for_ranks=True),
    LaunchOption("attempt", _K.NUMBER, default=0, variable="ACTORFLOW_ATTEMPT", for_ranks=True),
    LaunchOption("held_files", _K.TEXT, default="", variable="ACTORFLOW_HELD_FILES", for_ranks=True),
    LaunchOption("logs_port", _K.PORT, variable="ACTORFLOW_LOGS_PORT", for_ranks=True),
    LaunchOption("launcher", _K.TEXT, variable="ACTORFLOW_LAUNCHER", for_ranks=True),
    LaunchOption("launcher_pid", _K.COUNT, variable="ACTORFLOW_LAUNCHER_PID", for_ranks=True),
)
RANK_OPTIONS = tuple(option for option in (*RUN_OPTIONS, *_FOR_RANKS_ALONE) if option.for_ranks)
_HEEDED_BY_ALL = (DEVICE_TYPE, OVERSUBSCRIBE, NCCL_TIMEOUT, LOST_AFTER, FAN_OUT)


def read_rank_options(environ: Mapping[str, str]) -> dict[str, Any]:
    """The values that a launcher set for this process: field of ``Settings`` → value; ValueError for invalid text."""
    return {
        option.field: option.read(environ)
        for option in RANK_OPTIONS
        if option.variable in environ and option not in _HEEDED_BY_ALL
    }


def read_user_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """The variables that users may set, however the process was started: field of ``Settings`` → value.

    An empty variable counts as unset.  Raises ClusterError for an invalid value.
    """
    found: dict[str, Any] = {}
    for option in _HEEDED_BY_ALL:
        text = environ.get(option.variable)
        if not text:
            continue
        if option.fits is not None and not option.fits(text):
            raise ClusterError(f"{option.variable}={text} was found in the environment; {option.expected} was expected")
        found[option.field] = option.from_text(text)
    return found
