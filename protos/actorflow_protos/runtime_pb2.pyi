from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Batch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("ready", "credit", "steps", "part", "alike", "hello", "welcome", "failure", "heard", "farewell", "bye", "near", "failed", "vote", "hold", "decision", "beat", "silent", "stamp", "hurry", "tell", "told", "parent")
    READY_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ALIKE_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    HURRY_FIELD_NUMBER: _ClassVar[int]
    TELL_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    credit: Credit
    steps: Steps
    part: Part
    alike: Alike
    hello: Hello
    welcome: Welcome
    failure: Failure
    heard: Heard
    farewell: Farewell
    bye: Bye
    near: Near
    failed: Failed
    vote: Vote
    hold: Hold
    decision: Decision
    beat: Beat
    silent: Silent
    stamp: Stamp
    hurry: Hurry
    tell: Tell
    told: Told
    parent: Parent
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., steps: _Optional[_Union[Steps, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., alike: _Optional[_Union[Alike, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., heard: _Optional[_Union[Heard, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., near: _Optional[_Union[Near, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., silent: _Optional[_Union[Silent, _Mapping]] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ..., hurry: _Optional[_Union[Hurry, _Mapping]] = ..., tell: _Optional[_Union[Tell, _Mapping]] = ..., told: _Optional[_Union[Told, _Mapping]] = ..., parent: _Optional[_Union[Parent, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("plan", "register", "sequence", "nbytes", "inline", "payload")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    plan: int
    register: int
    sequence: int
    nbytes: int
    inline: bool
    payload: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, plan: _Optional[int] = ..., register: _Optional[int] = ..., sequence: _Optional[int] = ..., nbytes: _Optional[int] = ..., inline: bool = ..., payload: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("plan", "register")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    plan: int
    register: int
    def __init__(self, plan: _Optional[int] = ..., register: _Optional[int] = ...) -> None: ...

class Stamp(_message.Message):
    __slots__ = ("call", "history")
    CALL_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    call: int
    history: int
    def __init__(self, call: _Optional[int] = ..., history: _Optional[int] = ...) -> None: ...

class Steps(_message.Message):
    __slots__ = ("digests", "released", "ended", "wanted")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    digests: bytes
    released: _containers.RepeatedCompositeFieldContainer[Released]
    ended: bool
    wanted: int
    def __init__(self, digests: _Optional[bytes] = ..., released: _Optional[_Iterable[_Union[Released, _Mapping]]] = ..., ended: bool = ..., wanted: _Optional[int] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("call", "dropped")
    CALL_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    call: int
    dropped: Dropped
    def __init__(self, call: _Optional[int] = ..., dropped: _Optional[_Union[Dropped, _Mapping]] = ...) -> None: ...

class Dropped(_message.Message):
    __slots__ = ("plans", "variables")
    PLANS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedScalarFieldContainer[int]
    variables: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, plans: _Optional[_Iterable[int]] = ..., variables: _Optional[_Iterable[str]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("step", "last", "data", "sender", "receivers")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    step: int
    last: bool
    data: bytes
    sender: int
    receivers: _containers.RepeatedCompositeFieldContainer[Ranks]
    def __init__(self, step: _Optional[int] = ..., last: bool = ..., data: _Optional[bytes] = ..., sender: _Optional[int] = ..., receivers: _Optional[_Iterable[_Union[Ranks, _Mapping]]] = ...) -> None: ...

class Ranks(_message.Message):
    __slots__ = ("first", "end")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Alike(_message.Message):
    __slots__ = ("steps", "dropped")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    steps: int
    dropped: Dropped
    def __init__(self, steps: _Optional[int] = ..., dropped: _Optional[_Union[Dropped, _Mapping]] = ...) -> None: ...

class Hurry(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    def __init__(self, steps: _Optional[int] = ...) -> None: ...

class Tell(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class Told(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("call", "text", "cause", "message", "line", "rank")
    CALL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    call: int
    text: str
    cause: str
    message: str
    line: str
    rank: int
    def __init__(self, call: _Optional[int] = ..., text: _Optional[str] = ..., cause: _Optional[str] = ..., message: _Optional[str] = ..., line: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("call", "line")
    CALL_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    call: int
    line: str
    def __init__(self, call: _Optional[int] = ..., line: _Optional[str] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("call", "obstacle", "rank")
    CALL_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    call: int
    obstacle: str
    rank: int
    def __init__(self, call: _Optional[int] = ..., obstacle: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("failed", "obstacle")
    FAILED_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    failed: Failed
    obstacle: str
    def __init__(self, failed: _Optional[_Union[Failed, _Mapping]] = ..., obstacle: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("rank", "ticket")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    rank: int
    ticket: Ticket
    def __init__(self, rank: _Optional[int] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class Parent(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("rank", "node", "nnodes", "devices", "host", "pid", "address", "version", "python", "torch", "script", "digest", "argv", "machine", "socket", "libraries", "lost_after", "fan_out")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NNODES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    LIBRARIES_FIELD_NUMBER: _ClassVar[int]
    LOST_AFTER_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node: int
    nnodes: int
    devices: int
    host: str
    pid: int
    address: str
    version: str
    python: str
    torch: str
    script: str
    digest: str
    argv: _containers.RepeatedScalarFieldContainer[str]
    machine: str
    socket: str
    libraries: str
    lost_after: float
    fan_out: int
    def __init__(self, rank: _Optional[int] = ..., node: _Optional[int] = ..., nnodes: _Optional[int] = ..., devices: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., version: _Optional[str] = ..., python: _Optional[str] = ..., torch: _Optional[str] = ..., script: _Optional[str] = ..., digest: _Optional[str] = ..., argv: _Optional[_Iterable[str]] = ..., machine: _Optional[str] = ..., socket: _Optional[str] = ..., libraries: _Optional[str] = ..., lost_after: _Optional[float] = ..., fan_out: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("nodes", "hosts", "pids", "addresses", "machines", "sockets", "store_host", "store_port", "logs_port")
    NODES_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MACHINES_FIELD_NUMBER: _ClassVar[int]
    SOCKETS_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    LOGS_PORT_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    hosts: _containers.RepeatedScalarFieldContainer[str]
    pids: _containers.RepeatedScalarFieldContainer[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    machines: _containers.RepeatedScalarFieldContainer[str]
    sockets: _containers.RepeatedScalarFieldContainer[str]
    store_host: str
    store_port: int
    logs_port: int
    def __init__(self, nodes: _Optional[_Iterable[int]] = ..., hosts: _Optional[_Iterable[str]] = ..., pids: _Optional[_Iterable[int]] = ..., addresses: _Optional[_Iterable[str]] = ..., machines: _Optional[_Iterable[str]] = ..., sockets: _Optional[_Iterable[str]] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., logs_port: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("rank", "host", "pid", "kind", "cause", "noticed_by")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    NOTICED_BY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    pid: int
    kind: str
    cause: str
    noticed_by: int
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., kind: _Optional[str] = ..., cause: _Optional[str] = ..., noticed_by: _Optional[int] = ...) -> None: ...

class Heard(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Farewell(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Bye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Silent(_message.Message):
    __slots__ = ("rank", "seconds", "over", "waits", "by", "missing")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    rank: int
    seconds: float
    over: bool
    waits: str
    by: int
    missing: str
    def __init__(self, rank: _Optional[int] = ..., seconds: _Optional[float] = ..., over: bool = ..., waits: _Optional[str] = ..., by: _Optional[int] = ..., missing: _Optional[str] = ...) -> None: ...

class Near(_message.Message):
    __slots__ = ("connected",)
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    connected: bool
    def __init__(self, connected: bool = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class StoreCall(_message.Message):
    __slots__ = ("verb", "keys", "values", "number", "seconds")
    VERB_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    verb: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    number: int
    seconds: float
    def __init__(self, verb: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[bytes]] = ..., number: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("values", "keys", "number", "there")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    THERE_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    keys: _containers.RepeatedScalarFieldContainer[str]
    number: int
    there: bool
    def __init__(self, values: _Optional[_Iterable[bytes]] = ..., keys: _Optional[_Iterable[str]] = ..., number: _Optional[int] = ..., there: bool = ...) -> None: ...

class LogPiece(_message.Message):
    __slots__ = ("node", "rank", "file", "data")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    node: int
    rank: int
    file: str
    data: bytes
    def __init__(self, node: _Optional[int] = ..., rank: _Optional[int] = ..., file: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class LogsKept(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeReady(_message.Message):
    __slots__ = ("ticket", "node", "failed", "attempts", "left", "culprit", "done")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    node: int
    failed: bool
    attempts: int
    left: str
    culprit: int
    done: bool
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., node: _Optional[int] = ..., failed: bool = ..., attempts: _Optional[int] = ..., left: _Optional[str] = ..., culprit: _Optional[int] = ..., done: bool = ...) -> None: ...

class MeetingItem(_message.Message):
    __slots__ = ("attempt", "note", "refused", "over")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    note: str
    refused: str
    over: Over
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., note: _Optional[str] = ..., refused: _Optional[str] = ..., over: _Optional[_Union[Over, _Mapping]] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("number", "node", "nnodes", "port")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NNODES_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    number: int
    node: int
    nnodes: int
    port: int
    def __init__(self, number: _Optional[int] = ..., node: _Optional[int] = ..., nnodes: _Optional[int] = ..., port: _Optional[int] = ...) -> None: ...

class Over(_message.Message):
    __slots__ = ("status", "text")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    status: int
    text: str
    def __init__(self, status: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...
