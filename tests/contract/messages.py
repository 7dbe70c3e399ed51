"""Any message of the contract, from its descriptor: what a fuzzer of a running service sends.

Fields are drawn from values that are valid more often than random bytes are: small ids that repeat, packed arrays
of equal and of unequal lengths, limits and their neighbours, and now and then plain garbage.
"""

import struct
from collections.abc import Callable
from functools import cache

from google.protobuf.any_pb2 import Any
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_DEPTH = 7
"""Messages nested deeper than this stay empty."""

_EDGES_32 = [0, 1, 2, 7, 16, 2**16, 2**31, 2**32 - 1]
_EDGES_64 = [*_EDGES_32, 2**32, 2**32 + 1, 2**63, 2**64 - 1]


def _packed(code: str, edges: list[int]) -> st.SearchStrategy[bytes]:
    # Mostly one element: parallel arrays then have the same length, and get past the length checks.
    one, some = (st.lists(st.sampled_from(edges), min_size=low, max_size=high) for low, high in ((1, 1), (0, 4)))
    return st.one_of(one, some).map(lambda values: struct.pack(f"<{len(values)}{code}", *values))


def packed_bytes(name: str) -> st.SearchStrategy[bytes]:
    """Bytes as they stand in a field of that name: packed arrays, digests, and garbage."""
    wide = name.endswith(("_ids", "order", "generations", "completed_steps", "revocations", "parents"))
    likely = _packed("Q", _EDGES_64) if wide and name != "block_ids" else _packed("I", _EDGES_32)
    return st.one_of(likely, likely, st.just(b""), _packed("Q", _EDGES_64), st.just(bytes(32)), st.binary(max_size=9))


def _scalars() -> dict[int, st.SearchStrategy[object]]:
    unsigned_32, unsigned_64 = st.sampled_from(_EDGES_32), st.sampled_from(_EDGES_64)
    signed_32, signed_64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
    return {
        FieldDescriptor.TYPE_BOOL: st.booleans(),
        FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
        FieldDescriptor.TYPE_FIXED32: unsigned_32,
        FieldDescriptor.TYPE_FIXED64: unsigned_64,
        FieldDescriptor.TYPE_FLOAT: st.floats(width=32, allow_nan=False),
        FieldDescriptor.TYPE_INT32: signed_32,
        FieldDescriptor.TYPE_INT64: signed_64,
        FieldDescriptor.TYPE_SFIXED32: signed_32,
        FieldDescriptor.TYPE_SFIXED64: signed_64,
        FieldDescriptor.TYPE_SINT32: signed_32,
        FieldDescriptor.TYPE_SINT64: signed_64,
        FieldDescriptor.TYPE_STRING: st.sampled_from(["", "default", "x" * 300, "ü\u2028"]),
        FieldDescriptor.TYPE_UINT32: unsigned_32,
        FieldDescriptor.TYPE_UINT64: unsigned_64,
    }


_SCALARS = _scalars()


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[object]:
    if field.message_type is not None:
        return st.deferred(lambda: messages(field.message_type, depth + 1))
    if field.enum_type is not None:
        numbers = [value.number for value in field.enum_type.values]
        return st.sampled_from([*numbers, 999])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return packed_bytes(field.name)
    return _SCALARS[field.type]


def _assign(message: Message, field: FieldDescriptor, value: object) -> None:
    if field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


@cache
def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Messages of a type, with any subset of its fields set; at most one of each oneof survives."""
    make: Callable[[], Message] = GetMessageClass(descriptor)
    if depth >= MAX_DEPTH or descriptor.full_name == Any.DESCRIPTOR.full_name:
        return st.builds(make)
    fields = {
        field.name: (field, st.lists(_value(field, depth), max_size=2) if field.is_repeated else _value(field, depth))
        for field in descriptor.fields
        if not (field.message_type is not None and field.message_type.GetOptions().map_entry)
    }

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = make()
        chosen = draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=8)) if fields else []
        for name in chosen:
            field, strategy = fields[name]
            _assign(message, field, draw(strategy))
        return message

    return build()
