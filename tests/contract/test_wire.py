"""Packed arrays, grants, options and shared memory: what both sides rely on."""

import asyncio

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.v1.step_pb2 import Grant, GrantBody
from kvplane.wire import directory, errors, grants, limits, options, packed, stamps, tables
from kvplane.wire.identity import ModelIdentity

KEY = bytes(range(32))


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.integers(0, 2**64 - 1)))
def test_packed_arrays_come_back(narrow: list[int], wide: list[int]) -> None:
    """Pack, unpack, compare; four and eight bytes an element, little-endian."""
    assert packed.unpack_u32("f", packed.pack_u32(narrow), len(narrow)).tolist() == narrow
    assert packed.unpack_u64("f", packed.pack_u64(wide), len(wide)).tolist() == wide
    assert packed.pack_u32(narrow) == b"".join(value.to_bytes(4, "little") for value in narrow)


@pytest.mark.parametrize(("length", "count"), [(5, None), (8, 1), (0, 1), (4, 2)])
def test_bad_lengths_name_the_field(length: int, count: int | None) -> None:
    """A torn or unparallel array is refused, for both widths."""
    for unpack in (packed.unpack_u32, packed.unpack_u64):
        if length % 8 == 0 and unpack is packed.unpack_u64 and count == length // 8:
            continue
        with pytest.raises(errors.InvalidArgumentError) as refused:
            unpack("advance.tokens", bytes(length), count)
        assert refused.value.violations[0].field == "advance.tokens"


@pytest.mark.parametrize("value", [-1, 2**32])
def test_values_that_do_not_fit_are_not_wrapped(value: int) -> None:
    """A Python integer out of range is an error, never another token."""
    with pytest.raises(OverflowError):
        packed.pack_u32([value])


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (np.array([-1]), OverflowError),
        (np.array([2**32 + 5]), OverflowError),
        (np.array([1.7]), TypeError),
        ([1.7], TypeError),
    ],
)
def test_numpy_does_not_wrap_either(values: list[float] | np.ndarray, error: type[Exception]) -> None:
    """An array of another type is checked before it is cast."""
    with pytest.raises(error):
        packed.pack_u32(values)
    assert packed.pack_u32(np.array([5], np.int64)) == packed.pack_u32([5])


@given(st.binary(max_size=40), st.integers(0, 255), st.integers(0, 31))
def test_grants_cannot_be_forged(pool: bytes, flip: int, position: int) -> None:
    """A signed body comes back; a changed byte anywhere, or another key, is refused before it is parsed."""
    body = GrantBody(pool_id=pool.hex(), number=3, boot_ids=pool)
    grant = grants.sign(KEY, body)
    assert grants.verify(KEY, grant) == body
    mac = bytearray(grant.mac)
    mac[position] ^= flip
    other_key = bytes(31) + b"\1"
    forged = [
        (KEY, Grant(body=grant.body + b"\0", mac=grant.mac)),
        (KEY, Grant(body=b"\xff\xff", mac=grant.mac)),
        (KEY, Grant(body=grant.body)),
        (other_key, grant),
    ]
    if flip:
        forged.append((KEY, Grant(body=grant.body, mac=bytes(mac))))
    for key, each in forged:
        with pytest.raises(errors.NotGrantedError):
            grants.verify(key, each)


def test_a_short_key_is_refused() -> None:
    """A key is 32 bytes."""
    with pytest.raises(ValueError, match="31 bytes"):
        grants.mac(bytes(31), b"")


SPEC = directory.DirectorySpec(40, 16, ModelIdentity("w", "t", "float32", 16), 1, 2, 3, 4, 4, 4)


def sealed_directory() -> tuple[bytearray, directory.Directory, np.ndarray]:
    """A directory whose blocks 1..39 are sealed, and its stamps."""
    memory = bytearray(SPEC.num_bytes)
    view = directory.format_directory(memoryview(memory), SPEC)
    stamp = stamps.format_stamps(memoryview(bytearray(stamps.stamps_bytes(40))), 40, 1)
    ids = np.arange(1, 40)
    stamp[ids] = ids.astype(np.uint64) + np.uint64(3 << 32)
    directory.occupy(view.blocks, ids, stamp[ids], 0)
    rows = view.blocks[ids].copy()
    rows["filled"] = 16
    rows["digest"] = np.frombuffer(np.random.default_rng(0).bytes(32 * 39), "V32")
    directory.seal(view.blocks, ids, rows)
    return memory, view, stamp


def test_only_sealed_rows_under_their_stamp_count() -> None:
    """I3: a row counts if it is sealed, untorn, and its generation is the stamp's."""
    _, view, stamp = sealed_directory()
    expected = [False] + [True] * 39
    assert directory.sealed_mask(view.blocks, stamp).tolist() == expected
    stamp[7] += 1
    directory.void(view.blocks, np.array([8]))
    directory.occupy(view.blocks, np.array([9]), np.array([stamp[9]]), 0)
    for lost in (7, 8, 9):
        expected[lost] = False
    assert directory.sealed_mask(view.blocks, stamp).tolist() == expected


@given(st.integers(1, 39), st.integers(0, 95), st.integers(1, 255))
def test_any_changed_byte_of_a_row_unseals_it(block: int, offset: int, flip: int) -> None:
    """A torn row, or one that a stray write met, reads as unsealed; its neighbours do not."""
    memory, view, stamp = sealed_directory()
    memory[SPEC.offsets[3] + 96 * block + offset] ^= flip
    expected = np.arange(40) >= 1
    expected[block] = False
    if offset in (14, 15):  # the flags themselves: not covered by the check, and only bit 0 seals
        expected[block] = bool(view.blocks["flags"][block] & 1)
    assert directory.sealed_mask(view.blocks, stamp).tolist() == expected.tolist()


def test_a_directory_survives_its_writer() -> None:
    """Opened again from the same bytes, it is the same; the null block's row is untouched."""
    memory, view, stamp = sealed_directory()
    again = directory.open_directory(memoryview(bytes(memory)))
    assert again.blocks.tobytes() == view.blocks.tobytes()
    assert again.model_identity == SPEC.model.encode()
    assert again.blocks[0].tobytes() == bytes(96)
    assert directory.sealed_mask(again.blocks, stamp).sum() == 39


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"X", "no block directory"),
        (8, b"\2", "layout version 2"),
        (16, b"\0", "invalidated"),
        (60, b"\1", "layout"),
    ],
)
def test_what_is_no_directory_is_refused(position: int, value: bytes, message: str) -> None:
    """Foreign, newer, unfinished: each says what it is."""
    memory, _, _ = sealed_directory()
    memory[position : position + 1] = value
    with pytest.raises(ValueError, match=message):
        directory.open_directory(memoryview(memory))


def test_cut_memory_is_refused() -> None:
    """Nothing is read behind the end."""
    memory, _, _ = sealed_directory()
    for length in (0, 4095, len(memory) - 1):
        with pytest.raises(ValueError, match=r"bytes?"):
            directory.open_directory(memoryview(memory)[:length])
    with pytest.raises(ValueError, match="needs"):
        directory.format_directory(memoryview(bytearray(100)), SPEC)
    stamp, held = bytearray(stamps.stamps_bytes(9)), bytearray(stamps.hold_map_bytes(9))
    stamps.format_stamps(memoryview(stamp), 9, 1)
    stamps.format_hold_map(memoryview(held), 9, stamps.HoldMapOwner(1, 1, 1, 1, 0))
    for memory, opens in ((stamp, stamps.open_stamps), (held, stamps.open_hold_map)):
        with pytest.raises(ValueError, match="need"):
            opens(memoryview(memory)[:-1])
        with pytest.raises(ValueError, match="hold"):
            opens(memoryview(bytes(128)))


def test_an_identity_that_does_not_fit_is_refused() -> None:
    """The header holds the whole identity or none."""
    long = ModelIdentity("w" * 3000, "t", "float32", 16)
    spec = directory.DirectorySpec(2, 16, long, 1, 2, 3)
    with pytest.raises(ValueError, match="model identity"):
        directory.format_directory(memoryview(bytearray(spec.num_bytes)), spec)


def test_a_zero_row_never_counts() -> None:
    """Zeroed memory with a stray flag is not a sealed block."""
    rows = np.zeros(2, directory.BLOCK_ROW)
    rows["flags"] = 1
    assert not directory.sealed_mask(rows, np.zeros(2, np.uint64)).any()


def test_a_new_model_is_selected_last() -> None:
    """A writer that dies while it replaces the identity leaves the old one."""
    memory, view, _ = sealed_directory()
    old = view.model_identity
    selector = int(view.header["model_slot"][0])
    view.put_model(b"new")
    assert view.model_identity == b"new"
    view.header["model_slot"][0] = selector
    assert directory.open_directory(memoryview(memory)).model_identity == old


def test_namespace_rows_never_fall_back() -> None:
    """Versions only rise; a removed row is free again; a full table says so; half a row is none."""
    _, view, _ = sealed_directory()
    rows = view.namespaces
    tables.put_namespace(rows, 3, 7, bytes(32), "tenant", b"identity")
    tables.put_namespace(rows, 3, 6, bytes(range(32)), "tenant", b"identity")
    assert (int(rows["version"][0]), rows["root"][0].tobytes()) == (7, bytes(32))
    tables.put_namespace(rows, 3, 8, bytes(range(32)), "tenant", b"identity")
    assert (int(rows["version"][0]), rows["root"][0].tobytes()) == (8, bytes(range(32)))
    assert (tables.text(rows, 0, "tenant"), tables.text(rows, 0, "identity")) == (b"tenant", b"identity")
    rows["namespace_id"][1] = 9  # written by somebody who died before the flag
    assert tables.find(rows, namespace_id=9) is None
    for number in range(4, 7):
        tables.put_namespace(rows, number, 1, bytes(32), "", b"")
    with pytest.raises(errors.LimitExceededError, match="namespaces are full"):
        tables.put_namespace(rows, 9, 1, bytes(32), "", b"")
    tables.remove(rows, 0)
    assert tables.used(rows) == [1, 2, 3]
    tables.put_namespace(rows, 9, 1, bytes(32), "", b"")
    assert tables.find(rows, namespace_id=9) == 0
    with pytest.raises(ValueError, match="do not fit"):
        tables.padded(bytes(5), 4)


def test_generations_carry_their_incarnation() -> None:
    """incarnation ‖ counter."""
    assert stamps.generation(3, 5) == 0x0000000300000005
    assert stamps.incarnation_of(stamps.generation(2**32 - 1, stamps.COUNTER_MAX)) == 2**32 - 1


async def echo(request: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    """What came."""
    return request


ECHO: "grpc.RpcMethodHandler[bytes, bytes]" = grpc.unary_unary_rpc_method_handler(echo)


async def ports_and_limits() -> tuple[bool, grpc.StatusCode]:
    """Whether a second server could bind the same port, and what an oversized message got."""
    first, second = (grpc.aio.server(options=options.server_options()) for _ in range(2))
    first.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("kvplane.v1.CacheService", {"Lookup": ECHO})])
    port = first.add_insecure_port("127.0.0.1:0")
    try:
        shared = second.add_insecure_port(f"127.0.0.1:{port}") != 0
    except RuntimeError:
        shared = False
    await first.start()
    unlimited = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/kvplane.v1.CacheService/Lookup")
        try:
            await call(bytes(limits.MESSAGE_BYTES + 1), timeout=30)
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as failed:
            code = failed.code()
    await first.stop(None)
    return shared, code


def test_options_hold_on_a_real_server() -> None:
    """No two servers share a port in silence, and a message over the limit is refused as such."""
    assert asyncio.run(ports_and_limits()) == (False, grpc.StatusCode.RESOURCE_EXHAUSTED)
