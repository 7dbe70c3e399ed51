"""What can be wrong with a running pair, one check after the other: what is so, and what to do if it is bad."""

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from kvplane.cli import certificates
from kvplane.cli.connection import START_HINT, TIMEOUT_SECONDS, Connection, health_stub, reason
from kvplane.cli.model import ModelShape
from kvplane.cli.sizes import existing, format_bytes
from kvplane.v1 import cache_pb2, compute_pb2, types_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire.addresses import socket_path
from kvplane.wire.errors import KvplaneError
from kvplane.wire.packed import unpack_u32
from kvplane.wire.status import from_rpc_error

COMPUTE_HINT = "start one with `kvplane compute --cache {address} …` (flags: `kvplane plan`), or see its log"
SOON_DAYS = 14
"""A certificate that expires earlier is pointed out."""

FULL_SHARE = 0.01
"""A file system with less than this share left is called full."""

MIN_OPEN_FILES = 1024
SPARE_OPEN_FILES = 64
"""Descriptors that a service should have left: each connection takes one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    good: bool
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the pool should be; None: anything."""

    pool_id: str | None = None
    shape: ModelShape | None = None
    weights_revision: str | None = None
    tokenizer_revision: str | None = None
    kv_dtype: str | None = None
    block_tokens: int | None = None


def examine(connection: Connection, expected: Expected, memory_folder: Path, need_bytes: int) -> Iterator[Finding]:
    """All checks that make sense: those behind a failed one are left out."""
    yield from _certificates(connection)
    yield _memory(memory_folder, need_bytes)
    with connection.channel() as channel:
        reached = _cache_service(connection, channel)
        yield reached
        if not reached.good:
            return
        yield from _open_files("cache service", connection.address)
        try:
            pools = list(connection.control(channel).list_pools(cache_pb2.ListPoolsRequest(page_size=1000)).pools)
        except KvplaneError as error:
            yield Finding("pools", False, f"cannot be listed: {error.message}", "see the cache service's log")
            return
    if expected.pool_id is not None:
        pools = [pool for pool in pools if pool.pool_id == expected.pool_id]
    if not pools:
        which = f"pool {expected.pool_id}" if expected.pool_id else "any pool"
        hint = COMPUTE_HINT.format(address=connection.address)
        yield Finding("compute service", False, f"no compute service has registered for {which}", hint)
    for pool in pools:
        yield from _pool(connection, pool, expected)


def _certificates(connection: Connection) -> Iterator[Finding]:
    for path in certificates.files(connection):
        try:
            found = certificates.in_file(path)
        except (OSError, ValueError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            yield Finding("certificate", False, f"{path}: {text}", "give a PEM file")
            continue
        for validity in found:
            yield _validity(f"{path} ({validity.subject})", validity)
    if connection.tls_ca is not None and socket_path(connection.address) is None:
        yield from _server_certificate("cache service", connection.address, connection)


def _server_certificate(what: str, address: str, connection: Connection) -> Iterator[Finding]:
    try:
        validity = certificates.of_server(address, connection)
    except (OSError, ValueError):
        # Whether it can be reached is another check's finding.
        return
    yield _validity(f"of the {what} at {address} ({validity.subject})", validity)


def _validity(what: str, validity: certificates.Validity) -> Finding:
    now = certificates.now()
    problem = validity.problem(now)
    if problem:
        return Finding("certificate", False, f"{what} {problem}", "renew it, then restart the service that uses it")
    days = (validity.not_after - now).days
    soon = ": renew it soon" if days < SOON_DAYS else ""
    return Finding("certificate", True, f"{what} holds for {days} more days{soon}")


def _memory(folder: Path, need_bytes: int) -> Finding:
    """Room in the file system of the pool's memory, on this machine."""
    there = existing(folder)
    stats = os.statvfs(there)
    free, size = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    room = f"{format_bytes(free)} of {format_bytes(size)} left"
    if free >= need_bytes:
        return Finding("shared memory", True, f"{there} has {room}")
    state = "is full" if free < size * FULL_SHARE else "has too little room"
    return Finding(
        "shared memory",
        False,
        f"{there} {state}: {room}, {format_bytes(need_bytes)} needed",
        f"delete folders of pools that nobody uses (ls {there}), or: mount -o remount,size=… {_mount(there)}",
    )


def _mount(folder: Path) -> Path:
    while not folder.is_mount():
        folder = folder.parent
    return folder


def _cache_service(connection: Connection, channel: grpc.Channel) -> Finding:
    name = "cache service"
    try:
        answer = health_stub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
    except grpc.RpcError as failed:
        error = from_rpc_error(failed)
        tls = connection.tls_ca is None and socket_path(connection.address) is None
        hint = f"{START_HINT}; if it has TLS, give --tls-ca, --tls-certificate, --tls-key" if tls else START_HINT
        return Finding(name, False, f"no cache service at {connection.address}: {reason(error)}", hint)
    except OSError as error:
        return Finding(name, False, f"{error.filename}: {error.strerror}", "give readable PEM files")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return Finding(
            name, False, f"at {connection.address} is draining", "wait until it has ended, then start it again"
        )
    return Finding(name, True, f"serves at {connection.address}")


def _pool(connection: Connection, pool: types_pb2.Pool, expected: Expected) -> Iterator[Finding]:
    name = f"pool {pool.pool_id}"
    split = pool.layout.tensor_parallel * pool.layout.pipeline_parallel
    # Shards know their number; of a pool that has lost all of them only the layout does.
    world = max([shard.spec.world_size for shard in pool.shards] or [split or 1])
    connected = [shard for shard in pool.shards if shard.connected]
    state = types_pb2.PoolState.Name(pool.state).removeprefix("POOL_STATE_")
    if len(connected) < world:
        missing = sorted(set(range(world)) - {shard.rank for shard in connected})
        who = "no compute service is connected" if not connected else f"rank {_list(missing)} of {world} not connected"
        yield Finding(f"{name} shards", False, who, COMPUTE_HINT.format(address=connection.address))
    else:
        yield Finding(f"{name} shards", True, f"{world} of {world} connected")
    if pool.state == types_pb2.POOL_STATE_READY:
        yield Finding(name, True, f"READY, {pool.num_blocks - 1:,} blocks, incarnation {pool.incarnation}")
    else:
        yield Finding(name, False, f"is {state}", _state_hint(pool, len(connected) == world))
    yield from _model(name, pool, expected)
    for shard in connected:
        yield from _shard(connection, pool, shard)


def _list(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _state_hint(pool: types_pb2.Pool, complete: bool) -> str:
    if pool.state == types_pb2.POOL_STATE_DRAINING:
        return "it takes no new sequences: wait until it has ended, or start another"
    if not complete:
        return "it opens when all its compute services are connected"
    if not pool.num_blocks:
        return "its memory is being created, or could not be: see shared memory above, and the compute services' logs"
    return "it should open within seconds: see the cache service's log if it does not"


def _model(name: str, pool: types_pb2.Pool, expected: Expected) -> Iterator[Finding]:
    """Compares whatever was asked for, field by field."""
    group = pool.groups[0]
    heads, dim = group.tensors[0].shape if group.tensors else (0, 0)
    window = group.sliding_window.window_tokens if group.HasField("sliding_window") else None
    shape = expected.shape
    pairs: dict[str, tuple[object, object]] = {
        "weights_revision": (pool.model.weights_revision, expected.weights_revision),
        "tokenizer_revision": (pool.model.tokenizer_revision, expected.tokenizer_revision),
        "kv_dtype": (pool.model.kv_dtype, expected.kv_dtype),
        "block_tokens": (pool.model.block_tokens, expected.block_tokens),
    }
    if shape is not None:
        pairs |= {
            "num_layers": (len(unpack_u32("layers", group.layers)), shape.num_layers),
            "num_kv_heads": (heads, shape.num_kv_heads),
            "head_dim": (dim, shape.head_dim),
            "window_tokens": (window or "none", shape.window_tokens or "none"),
        }
    asked = {field: pair for field, pair in pairs.items() if pair[1] is not None}
    if not asked:
        return
    wrong = [f"{field} is {has}, expected {should}" for field, (has, should) in asked.items() if has != should]
    if wrong:
        hint = "this pool is another model's: use another --pool-id, or start its compute services with this model"
        yield Finding(f"{name} model", False, f"wrong model identity: {'; '.join(wrong)}", hint)
    else:
        yield Finding(f"{name} model", True, f"{', '.join(asked)} as expected")


def _shard(connection: Connection, pool: types_pb2.Pool, shard: types_pb2.Shard) -> Iterator[Finding]:
    name = f"pool {pool.pool_id} shard {shard.rank}"
    if connection.tls_ca is not None and socket_path(shard.address) is None:
        yield from _server_certificate(name, shard.address, connection)
    try:
        with connection.channel(shard.address) as channel:
            stub = ComputeServiceStub(channel)
            found = stub.GetShard(compute_pb2.GetShardRequest(), timeout=TIMEOUT_SECONDS)
    except grpc.RpcError as failed:
        why = reason(from_rpc_error(failed))
        hint = "its address must be reachable from here: see --advertise of kvplane compute"
        yield Finding(name, False, f"no compute service at {shard.address}: {why}", hint)
        return
    differs = [
        f"{field} is {theirs} there and {ours} in the cache service"
        for field, theirs, ours in (
            ("boot_id", found.shard.boot_id, shard.boot_id),
            ("pool_id", found.pool_id, pool.pool_id),
            ("incarnation", found.incarnation, pool.incarnation),
            ("pool_epoch", found.pool_epoch, pool.pool_epoch),
        )
        if theirs != ours
    ]
    if differs:
        hint = "two cache services may be working on one pool: stop one; else wait until the pool is READY"
        yield Finding(name, False, f"at {shard.address}: {'; '.join(differs)}", hint)
    elif not found.control_plane_connected:
        yield Finding(
            name, False, f"at {shard.address} has lost the cache service", "see its log; it dials again by itself"
        )
    else:
        detail = f"serves at {shard.address}, {format_bytes(found.pool_bytes)}, incarnation {found.incarnation}"
        yield Finding(name, True, detail)
    yield from _open_files(name, shard.address)


def _open_files(name: str, address: str) -> Iterator[Finding]:
    """Descriptors of the process behind a Unix socket, as far as this user may see them."""
    path = socket_path(address)
    if path is None:
        return
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(os.fspath(path))
            pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        process = Path("/proc") / str(pid)
        line = next(line for line in (process / "limits").read_text().splitlines() if line.startswith("Max open files"))
        used = sum(1 for _ in (process / "fd").iterdir())
    except OSError:
        return
    soft = line.split()[3]
    detail = f"process {pid} uses {used} of {soft}"
    if soft != "unlimited" and (int(soft) < MIN_OPEN_FILES or int(soft) - used < SPARE_OPEN_FILES):
        hint = f"start it with `ulimit -n {max(65_536, 2 * int(soft))}`, or LimitNOFILE= in its unit"
        yield Finding(f"{name} open files", False, f"{detail}, too few", hint)
    else:
        yield Finding(f"{name} open files", True, detail)
