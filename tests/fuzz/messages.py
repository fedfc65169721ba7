"""Draws any message of the contract from its descriptor: extremes, NaN, huge lists, unknown enum values."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_DEPTH = 4
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 3.4e38, -3.4e38, math.nan, math.inf, -math.inf]
TEXTS = ["", "x", "\x00", "\ud7ff\ufffd", "a" * 5000, "<|im_end|>", "\u202e\U0001f469\u200d\U0001f680", "{{ 7*7 }}"]
INTEGERS = {32: [0, 1, -1, 2, 7, 255, 49_151, 49_152, 2**31 - 1, -(2**31)], 64: [0, 1, -1, 2**63 - 1, -(2**63)]}
SIZES = [0, 0, 1, 1, 1, 2, 3, 17, 300]


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.sampled_from(FLOATS) | st.floats(width=32)
    if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64):
        bits = 32 if kind == FieldDescriptor.CPPTYPE_INT32 else 64
        return st.sampled_from(INTEGERS[bits]) | st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([*(value.number for value in field.enum_type.values), -1, 99])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=50)
    return st.sampled_from(TEXTS) | st.text(max_size=20)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """Any message of a type; each field is left out more often than not."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        wanted = depth == 0 or draw(st.integers(0, 3)) == 0
        if not wanted or (field.message_type is not None and depth >= MAX_DEPTH):
            continue
        if _is_map(field):
            _fill_map(draw, message, field)
        elif field.is_repeated:
            _fill_list(draw, message, field, depth)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(messages(field.message_type, depth + 1)))
        else:
            setattr(message, field.name, draw(_scalar(field)))
    return message


def _fill_map(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    entry = field.message_type.fields_by_name
    keys, values = _scalar(entry["key"]), _scalar(entry["value"])
    for _ in range(draw(st.sampled_from([0, 1, 3]))):
        getattr(message, field.name)[draw(keys)] = draw(values)


def _fill_list(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    size, target = draw(st.sampled_from(SIZES)), getattr(message, field.name)
    if field.message_type is not None:
        for _ in range(min(size, 3)):
            target.add().CopyFrom(draw(messages(field.message_type, depth + 1)))
    else:
        target.extend([draw(_scalar(field))] * size)
