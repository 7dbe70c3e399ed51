"""Golden bytes: what travels and what lies in shared memory does not change by accident."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from google.protobuf.message_factory import GetMessageClass

from contract import outline
from kvplane.wire import directory, stamps
from kvplane.wire.identity import ModelIdentity

GOLDEN = Path(__file__).parent / "golden"
WIRE: list[dict[str, Any]] = json.loads((GOLDEN / "wire.json").read_text())["messages"]
MEMORY: dict[str, Any] = json.loads((GOLDEN / "memory.json").read_text())

SPEC = directory.DirectorySpec(
    num_blocks=3,
    block_tokens=16,
    model=ModelIdentity("w1", "t1", "bfloat16", 16),
    pool_epoch=7,
    boot_id=0x1122334455667788,
    incarnation=9,
    num_namespaces=1,
    num_sessions=1,
    num_processes=1,
)


@pytest.mark.parametrize("golden", WIRE, ids=lambda golden: str(golden["name"]))
def test_golden_messages(golden: dict[str, Any]) -> None:
    """Text, message and bytes are three forms of one thing."""
    (descriptor,) = (each for each in outline.messages() if each.full_name == golden["type"])
    message = text_format.Parse("\n".join(golden["text"]), GetMessageClass(descriptor)())
    assert message.SerializeToString(deterministic=True).hex() == golden["hex"]
    assert type(message).FromString(bytes.fromhex(golden["hex"])) == message


def field_table(dtype: np.dtype[np.void]) -> dict[str, list[int]]:
    """Offset and bytes of each field."""
    assert dtype.fields is not None
    return {name: [offset, field.itemsize] for name, (field, offset, *_) in dtype.fields.items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("header", directory.HEADER),
        ("namespace_row", directory.NAMESPACE_ROW),
        ("session_row", directory.SESSION_ROW),
        ("process_row", directory.PROCESS_ROW),
        ("block_row", directory.BLOCK_ROW),
        ("stamps_header", stamps.STAMPS_HEADER),
        ("hold_map_header", stamps.HOLD_MAP_HEADER),
    ],
)
def test_golden_memory_layout(name: str, dtype: np.dtype[np.void]) -> None:
    """Every field is where docs/directory.md says."""
    assert {"bytes": dtype.itemsize, "fields": field_table(dtype)} == MEMORY["layouts"][name]


def independent_check(row: bytes) -> int:
    """`row_check` of docs/directory.md in plain integers."""
    total = 0x6B76706C616E6531
    for index in range(12):
        word = int.from_bytes(row[8 * index : 8 * index + 8], "little")
        if index == 1:
            word &= 0x0000FFFF00000000
        word ^= word >> 32
        factor = ((index + 1) * 0x9E3779B97F4A7C15) % 2**64 | 1
        total = (total + word * factor) % 2**64
    return total >> 32


def test_golden_directory_bytes() -> None:
    """A sealed row, byte by byte, written by the library and by `struct` from the page."""
    memory = bytearray(SPEC.num_bytes)
    view = directory.format_directory(memoryview(memory), SPEC)
    sealed = np.zeros(1, directory.BLOCK_ROW)
    for field, value in {
        "generation": stamps.generation(9, 5),
        "filled": 16,
        "group": 1,
        "depth": 2,
        "namespace_id": 3,
        "checksum": 0xCAFEBABE,
        "digest": np.void(bytes(range(32))),
        "parent": np.void(bytes(range(32, 64))),
    }.items():
        sealed[field] = value
    directory.seal(view.blocks, np.array([2]), sealed)

    content = struct.pack("<IIII", 1, 2, 3, 0xCAFEBABE) + bytes(range(64))
    unchecked = struct.pack("<QIHH", 9 << 32 | 5, 0, 16, 0) + content
    row = struct.pack("<QIHH", 9 << 32 | 5, independent_check(unchecked), 16, 1) + content
    assert view.blocks[2].tobytes() == row
    assert row.hex() == MEMORY["bytes"]["sealed_row"]
    assert bytes(memory[:128]).hex() == MEMORY["bytes"]["header_start"]
    assert bytes(view.model_identity) == SPEC.model.encode()
    assert view.blocks[:2].tobytes() == bytes(2 * 96)


def test_golden_stamp_and_hold_map_bytes() -> None:
    """Headers and contents, byte by byte."""
    memory = bytearray(stamps.stamps_bytes(3))
    array = stamps.format_stamps(memoryview(memory), 3, 7)
    array[2] = stamps.generation(9, 5)
    assert bytes(memory) == b"KVPLSTMP" + struct.pack("<IIQ40xQQQ", 1, 3, 7, 0, 0, 9 << 32 | 5)

    owner = stamps.HoldMapOwner(session_id=11, lease_epoch=12, pid=13, start_ticks=14, rank=15)
    memory = bytearray(stamps.hold_map_bytes(9))
    bits = stamps.format_hold_map(memoryview(memory), 9, owner)
    bits[1] |= 1
    assert bytes(memory[:66]) == b"KVPLHOLD" + struct.pack("<IIQQQII16xBB", 1, 9, 11, 12, 14, 13, 15, 0, 1)
    assert stamps.held_blocks(bits).tolist() == [8]
    assert len(memory) == 128
