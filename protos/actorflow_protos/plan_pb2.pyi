from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Arg(_message.Message):
    __slots__ = ("none", "boolean", "integer", "real", "text", "symbol", "ref", "list")
    NONE_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    none: bool
    boolean: bool
    integer: int
    real: float
    text: str
    symbol: str
    ref: int
    list: ArgList
    def __init__(self, none: bool = ..., boolean: bool = ..., integer: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., symbol: _Optional[str] = ..., ref: _Optional[int] = ..., list: _Optional[_Union[ArgList, _Mapping]] = ...) -> None: ...

class ArgList(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Arg]
    def __init__(self, items: _Optional[_Iterable[_Union[Arg, _Mapping]]] = ...) -> None: ...

class NamedArg(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: Arg
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[Arg, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("op", "args", "kwargs", "outs")
    OP_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    OUTS_FIELD_NUMBER: _ClassVar[int]
    op: str
    args: _containers.RepeatedCompositeFieldContainer[Arg]
    kwargs: _containers.RepeatedCompositeFieldContainer[NamedArg]
    outs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, op: _Optional[str] = ..., args: _Optional[_Iterable[_Union[Arg, _Mapping]]] = ..., kwargs: _Optional[_Iterable[_Union[NamedArg, _Mapping]]] = ..., outs: _Optional[_Iterable[int]] = ...) -> None: ...

class Body(_message.Message):
    __slots__ = ("inputs", "steps", "outputs")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    inputs: int
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    outputs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, inputs: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., outputs: _Optional[_Iterable[int]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("shape", "dtype", "sbp", "combine", "name")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SBP_FIELD_NUMBER: _ClassVar[int]
    COMBINE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    sbp: str
    combine: str
    name: str
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., sbp: _Optional[str] = ..., combine: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Read(_message.Message):
    __slots__ = ("actor", "firings")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    FIRINGS_FIELD_NUMBER: _ClassVar[int]
    actor: int
    firings: int
    def __init__(self, actor: _Optional[int] = ..., firings: _Optional[int] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("id", "producer", "readers", "tensors", "slots", "initial", "fill")
    ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    id: int
    producer: int
    readers: _containers.RepeatedCompositeFieldContainer[Read]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    slots: int
    initial: int
    fill: int
    def __init__(self, id: _Optional[int] = ..., producer: _Optional[int] = ..., readers: _Optional[_Iterable[_Union[Read, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., slots: _Optional[int] = ..., initial: _Optional[int] = ..., fill: _Optional[int] = ...) -> None: ...

class Operand(_message.Message):
    __slots__ = ("tensor", "variable", "scalar", "piece", "input")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    tensor: RegisterTensor
    variable: str
    scalar: str
    piece: bool
    input: str
    def __init__(self, tensor: _Optional[_Union[RegisterTensor, _Mapping]] = ..., variable: _Optional[str] = ..., scalar: _Optional[str] = ..., piece: bool = ..., input: _Optional[str] = ...) -> None: ...

class RegisterTensor(_message.Message):
    __slots__ = ("register", "index")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    register: int
    index: int
    def __init__(self, register: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("tensor", "variable", "result")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    tensor: RegisterTensor
    variable: str
    result: int
    def __init__(self, tensor: _Optional[_Union[RegisterTensor, _Mapping]] = ..., variable: _Optional[str] = ..., result: _Optional[int] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("start", "size")
    START_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    start: _containers.RepeatedScalarFieldContainer[int]
    size: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[_Iterable[int]] = ..., size: _Optional[_Iterable[int]] = ...) -> None: ...

class Boxes(_message.Message):
    __slots__ = ("boxes",)
    BOXES_FIELD_NUMBER: _ClassVar[int]
    boxes: _containers.RepeatedCompositeFieldContainer[Box]
    def __init__(self, boxes: _Optional[_Iterable[_Union[Box, _Mapping]]] = ...) -> None: ...

class Exchange(_message.Message):
    __slots__ = ("send", "receive", "add")
    SEND_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    send: _containers.RepeatedCompositeFieldContainer[Boxes]
    receive: _containers.RepeatedCompositeFieldContainer[Boxes]
    add: bool
    def __init__(self, send: _Optional[_Iterable[_Union[Boxes, _Mapping]]] = ..., receive: _Optional[_Iterable[_Union[Boxes, _Mapping]]] = ..., add: bool = ...) -> None: ...

class Stretch(_message.Message):
    __slots__ = ("first", "step", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    step: int
    count: int
    def __init__(self, first: _Optional[int] = ..., step: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Comm(_message.Message):
    __slots__ = ("kind", "id", "group", "exchanges", "plane")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    id: int
    group: _containers.RepeatedCompositeFieldContainer[Stretch]
    exchanges: _containers.RepeatedScalarFieldContainer[int]
    plane: str
    def __init__(self, kind: _Optional[str] = ..., id: _Optional[int] = ..., group: _Optional[_Iterable[_Union[Stretch, _Mapping]]] = ..., exchanges: _Optional[_Iterable[int]] = ..., plane: _Optional[str] = ...) -> None: ...

class Actor(_message.Message):
    __slots__ = ("id", "name", "rank", "queue", "kind", "rate", "body", "operands", "targets", "comm", "flops", "stage", "momentary", "flops_dtype", "traffic", "fused_traffic")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    OPERANDS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    COMM_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MOMENTARY_FIELD_NUMBER: _ClassVar[int]
    FLOPS_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    FUSED_TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    rank: int
    queue: str
    kind: str
    rate: int
    body: int
    operands: _containers.RepeatedCompositeFieldContainer[Operand]
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    comm: Comm
    flops: float
    stage: int
    momentary: int
    flops_dtype: str
    traffic: int
    fused_traffic: int
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ..., rank: _Optional[int] = ..., queue: _Optional[str] = ..., kind: _Optional[str] = ..., rate: _Optional[int] = ..., body: _Optional[int] = ..., operands: _Optional[_Iterable[_Union[Operand, _Mapping]]] = ..., targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ..., comm: _Optional[_Union[Comm, _Mapping]] = ..., flops: _Optional[float] = ..., stage: _Optional[int] = ..., momentary: _Optional[int] = ..., flops_dtype: _Optional[str] = ..., traffic: _Optional[int] = ..., fused_traffic: _Optional[int] = ...) -> None: ...

class Variable(_message.Message):
    __slots__ = ("name", "shape", "dtype", "placement_type", "ranks", "hierarchy", "sbp", "kind", "weights")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HIERARCHY_FIELD_NUMBER: _ClassVar[int]
    SBP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    placement_type: str
    ranks: _containers.RepeatedCompositeFieldContainer[Stretch]
    hierarchy: _containers.RepeatedScalarFieldContainer[int]
    sbp: str
    kind: str
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., placement_type: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[Stretch, _Mapping]]] = ..., hierarchy: _Optional[_Iterable[int]] = ..., sbp: _Optional[str] = ..., kind: _Optional[str] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("index", "shape", "dtype", "placement_type", "ranks", "hierarchy", "sbp", "weights")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HIERARCHY_FIELD_NUMBER: _ClassVar[int]
    SBP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    placement_type: str
    ranks: _containers.RepeatedCompositeFieldContainer[Stretch]
    hierarchy: _containers.RepeatedScalarFieldContainer[int]
    sbp: str
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., placement_type: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[Stretch, _Mapping]]] = ..., hierarchy: _Optional[_Iterable[int]] = ..., sbp: _Optional[str] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("rank", "queue", "actors")
    RANK_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ACTORS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    queue: str
    actors: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rank: _Optional[int] = ..., queue: _Optional[str] = ..., actors: _Optional[_Iterable[int]] = ...) -> None: ...

class Constant(_message.Message):
    __slots__ = ("name", "shape", "dtype", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class RankBytes(_message.Message):
    __slots__ = ("rank", "parameters", "optimizer", "activations")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    parameters: int
    optimizer: int
    activations: int
    def __init__(self, rank: _Optional[int] = ..., parameters: _Optional[int] = ..., optimizer: _Optional[int] = ..., activations: _Optional[int] = ...) -> None: ...

class KindBytes(_message.Message):
    __slots__ = ("kind", "bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    bytes: int
    def __init__(self, kind: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("stages", "actors", "flops", "redundant_flops", "memory", "moved")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ACTORS_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    REDUNDANT_FLOPS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedScalarFieldContainer[str]
    actors: int
    flops: float
    redundant_flops: float
    memory: _containers.RepeatedCompositeFieldContainer[RankBytes]
    moved: _containers.RepeatedCompositeFieldContainer[KindBytes]
    def __init__(self, stages: _Optional[_Iterable[str]] = ..., actors: _Optional[int] = ..., flops: _Optional[float] = ..., redundant_flops: _Optional[float] = ..., memory: _Optional[_Iterable[_Union[RankBytes, _Mapping]]] = ..., moved: _Optional[_Iterable[_Union[KindBytes, _Mapping]]] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("module", "line")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    module: str
    line: str
    def __init__(self, module: _Optional[str] = ..., line: _Optional[str] = ...) -> None: ...

class StepsOf(_message.Message):
    __slots__ = ("actor", "places")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    actor: int
    places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, actor: _Optional[int] = ..., places: _Optional[_Iterable[int]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("module", "phase", "placement", "count", "ops", "places")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    module: str
    phase: str
    placement: str
    count: int
    ops: _containers.RepeatedScalarFieldContainer[str]
    places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, module: _Optional[str] = ..., phase: _Optional[str] = ..., placement: _Optional[str] = ..., count: _Optional[int] = ..., ops: _Optional[_Iterable[str]] = ..., places: _Optional[_Iterable[int]] = ...) -> None: ...

class Flow(_message.Message):
    __slots__ = ("source", "target", "name", "shape", "dtype", "sbp", "read", "boxing", "moved")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SBP_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    BOXING_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    source: int
    target: int
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    sbp: str
    read: str
    boxing: _containers.RepeatedScalarFieldContainer[str]
    moved: int
    def __init__(self, source: _Optional[int] = ..., target: _Optional[int] = ..., name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., sbp: _Optional[str] = ..., read: _Optional[str] = ..., boxing: _Optional[_Iterable[str]] = ..., moved: _Optional[int] = ...) -> None: ...

class Origins(_message.Message):
    __slots__ = ("places", "steps", "parts", "flows")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedCompositeFieldContainer[Place]
    steps: _containers.RepeatedCompositeFieldContainer[StepsOf]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    flows: _containers.RepeatedCompositeFieldContainer[Flow]
    def __init__(self, places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[StepsOf, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., flows: _Optional[_Iterable[_Union[Flow, _Mapping]]] = ...) -> None: ...

class ConsideredPlan(_message.Message):
    __slots__ = ("text", "seconds", "nbytes", "moved", "why", "estimated")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_FIELD_NUMBER: _ClassVar[int]
    text: str
    seconds: float
    nbytes: int
    moved: int
    why: str
    estimated: bool
    def __init__(self, text: _Optional[str] = ..., seconds: _Optional[float] = ..., nbytes: _Optional[int] = ..., moved: _Optional[int] = ..., why: _Optional[str] = ..., estimated: bool = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("name", "world", "pieces", "bodies", "actors", "registers", "variables", "results", "orders", "constants", "notes", "summary", "ranks", "calls", "origins", "mode", "considered", "exchanges")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    ACTORS_FIELD_NUMBER: _ClassVar[int]
    REGISTERS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    CONSTANTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    world: int
    pieces: int
    bodies: _containers.RepeatedCompositeFieldContainer[Body]
    actors: _containers.RepeatedCompositeFieldContainer[Actor]
    registers: _containers.RepeatedCompositeFieldContainer[Register]
    variables: _containers.RepeatedCompositeFieldContainer[Variable]
    results: _containers.RepeatedCompositeFieldContainer[Result]
    orders: _containers.RepeatedCompositeFieldContainer[Order]
    constants: _containers.RepeatedCompositeFieldContainer[Constant]
    notes: _containers.RepeatedScalarFieldContainer[str]
    summary: Summary
    ranks: _containers.RepeatedScalarFieldContainer[int]
    calls: _containers.RepeatedCompositeFieldContainer[Order]
    origins: Origins
    mode: str
    considered: _containers.RepeatedCompositeFieldContainer[ConsideredPlan]
    exchanges: _containers.RepeatedCompositeFieldContainer[Exchange]
    def __init__(self, name: _Optional[str] = ..., world: _Optional[int] = ..., pieces: _Optional[int] = ..., bodies: _Optional[_Iterable[_Union[Body, _Mapping]]] = ..., actors: _Optional[_Iterable[_Union[Actor, _Mapping]]] = ..., registers: _Optional[_Iterable[_Union[Register, _Mapping]]] = ..., variables: _Optional[_Iterable[_Union[Variable, _Mapping]]] = ..., results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ..., orders: _Optional[_Iterable[_Union[Order, _Mapping]]] = ..., constants: _Optional[_Iterable[_Union[Constant, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ..., ranks: _Optional[_Iterable[int]] = ..., calls: _Optional[_Iterable[_Union[Order, _Mapping]]] = ..., origins: _Optional[_Union[Origins, _Mapping]] = ..., mode: _Optional[str] = ..., considered: _Optional[_Iterable[_Union[ConsideredPlan, _Mapping]]] = ..., exchanges: _Optional[_Iterable[_Union[Exchange, _Mapping]]] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("path", "column")
    PATH_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedScalarFieldContainer[int]
    column: int
    def __init__(self, path: _Optional[_Iterable[int]] = ..., column: _Optional[int] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("differences",)
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    differences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, differences: _Optional[_Iterable[int]] = ...) -> None: ...

class PlanClass(_message.Message):
    __slots__ = ("ranks", "part", "differences", "columns")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    part: bytes
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., part: _Optional[bytes] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ...) -> None: ...
