"""Tag-length-value fields: the byte-exact encoding behind identities and digests.

Protobuf bytes are not canonical (field order, unknown fields, varint padding), so what is hashed is
encoded here instead: `tag u8 ‖ length u32 LE ‖ value`. A concatenation of fields decodes in exactly one
way, so two different inputs never encode alike.
"""

import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<BI")

HEADER_BYTES = _HEADER.size
"""Bytes that a field adds to its value."""


def field(tag: int, value: bytes) -> bytes:
    """Encode one field. Raises `struct.error` when `tag` is not a byte or the value exceeds 4 GiB."""
    return _HEADER.pack(tag, len(value)) + value


def text(tag: int, value: str) -> bytes:
    """Encode one field whose value is UTF-8 text."""
    return field(tag, value.encode())


def u32(tag: int, value: int) -> bytes:
    """Encode one field whose value is a little-endian u32."""
    return field(tag, struct.pack("<I", value))


def u64(tag: int, value: int) -> bytes:
    """Encode one field whose value is a little-endian u64."""
    return field(tag, struct.pack("<Q", value))


def fields(encoded: bytes) -> Iterator[tuple[int, bytes]]:
    """Decode a concatenation of fields. Raises `ValueError` where one is cut short."""
    position = 0
    while position < len(encoded):
        if position + HEADER_BYTES > len(encoded):
            raise ValueError(f"field header cut short at byte {position} of {len(encoded)}")
        tag, length = _HEADER.unpack_from(encoded, position)
        position += HEADER_BYTES
        if position + length > len(encoded):
            raise ValueError(f"field {tag:#04x} wants {length} bytes at byte {position} of {len(encoded)}")
        yield tag, encoded[position : position + length]
        position += length
