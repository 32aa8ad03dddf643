"""A plan goes in and comes out as JSON, which loads back to an equal plan, or as text for people; both open with the summary."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from actorflow_compiler.errors import PlanError
from actorflow_compiler.plan import (
    Actor,
    FromRegister,
    OfInput,
    OfScalar,
    OfVariable,
    Order,
    Plan,
    Register,
    TensorSpec,
    ToResult,
)
from actorflow_compiler.plan_proto import from_proto, to_proto
from actorflow_protos import plan_pb2 as pb

WIDTH = 120  # columns of the text form


# ---- JSON


def to_json(plan: Plan) -> str:
    """The plan as JSON: names as in ``plan.proto``, one line for each actor, register and so on.

    The first key is ``summary``, complete even where a figure is zero; ``summary.redundant_flops`` is a fraction.
    """
    message = to_proto(plan)
    rest = json_format.MessageToDict(message, preserving_proto_field_name=True)
    rest.pop("summary", None)
    summary = json_format.MessageToDict(
        message.summary, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _numbers(summary, pb.Summary.DESCRIPTOR)
    _numbers(rest, pb.Plan.DESCRIPTOR)
    head = textwrap.indent(json.dumps(summary, indent=2, ensure_ascii=False), "  ").lstrip()
    lines = [f'  "summary": {head}']
    for key, value in rest.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in value)
            lines.append(f'  "{key}": [\n{items}\n  ]')
        else:
            lines.append(f'  "{key}": {json.dumps(value, ensure_ascii=False)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str) -> Plan:
    """The plan that ``to_json`` was given.  Raises PlanError for text that is no plan."""
    try:
        return from_proto(json_format.Parse(text, pb.Plan()))
    except (json_format.ParseError, RecursionError) as error:
        raise PlanError(f"JSON of a plan was expected; what was found cannot be read: {error}") from error


def _numbers(value: dict[str, Any], descriptor: Descriptor) -> None:
    """Write integers of 64 bits as numbers, in place: protobuf writes them as strings, for JavaScript's sake."""
    for name, field in descriptor.fields_by_name.items():
        if name not in value:
            continue
        items = value[name] if isinstance(value[name], list) else [value[name]]
        if field.message_type is not None:
            for item in items:
                _numbers(item, field.message_type)
        elif field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64):
            value[name] = [int(i) for i in items] if isinstance(value[name], list) else int(value[name])
