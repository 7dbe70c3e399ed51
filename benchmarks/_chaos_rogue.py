"""A client that behaves badly on the wire, against services that must not care: part of a chaos run.

    python -m _chaos_rogue TTL_SECONDS RUN_SEED

with `$KVPLANE_ADDRESS` set. Standard input takes one attack a line: `duplicate`, `reorder`, `replay` or `arenas N`.
Standard output answers each with one JSON object: what was tried, what was accepted that must not be (`accepted`, 0
when all is well), and whether the attack came to its end (`done`; the services may be away meanwhile).
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import grpc
from _chaos_oracle import NUM_KV_HEADS
from _chaos_wire import CALL_SECONDS, Execute, Wire

from kvplane.client.compute.attach_socket import attach
from kvplane.client.lease import Lease
from kvplane.client.state import SessionState
from kvplane.v1 import compute_pb2, step_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire.errors import KvplaneError, LimitExceededError, StepOutOfOrderError
from kvplane.wire.options import channel_options
from kvplane.wire.packed import pack_u32, pack_u64
from kvplane.wire.status import from_status

ARENA_BYTES = 1 << 20


class Accepted(Exception):  # noqa: N818 - an outcome, not a failure of this program
    """The services took what they must refuse, or answered twice in different ways."""


def duplicate(wire: Wire, undo: ExitStack) -> int:  # noqa: ARG001 - all attacks have one face
    """Every step twice, the second before or after the first's answer: applied once, answered alike."""
    for _ in range(6):
        name, operation = wire.admission()
        finish = step_pb2.Finish(sequence_ids=pack_u64([name]), reasons=pack_u32([step_pb2.FINISH_REASON_STOP]))
        for step in (wire.step(**operation), wire.step(finish=finish), wire.step()):
            at_once = wire.random.random() < 0.5
            wire.send(step)
            if at_once:
                wire.send(step)
            first = wire.receive()
            if not at_once:
                wire.send(step)
            second = wire.receive()
            if first.HasField("rejected"):
                raise from_status(first.rejected.status)
            if first.SerializeToString(deterministic=True) != second.SerializeToString(deterministic=True):
                raise Accepted(f"step {step.step_id} was answered twice, differently")
            wire.seen = first.result.step_id
    return 18


def reorder(wire: Wire, undo: ExitStack) -> int:  # noqa: ARG001 - all attacks have one face
    """A later step first: refused and without effect; then both in order."""
    for _ in range(6):
        name, operation = wire.admission()
        first = wire.step(**operation)
        finish = step_pb2.Finish(sequence_ids=pack_u64([name]), reasons=pack_u32([step_pb2.FINISH_REASON_STOP]))
        second = wire.step(finish=finish)
        wire.send(second)
        response = wire.receive()
        if not response.HasField("rejected"):
            raise Accepted(f"step {second.step_id} was taken before step {first.step_id}")
        error = from_status(response.rejected.status)
        if not isinstance(error, StepOutOfOrderError):
            raise error
        wire.exchange(first)
        wire.exchange(second)
        wire.exchange(wire.step())
    return 6


def replay(wire: Wire, undo: ExitStack) -> int:
    """A finished sequence's plan and grant once more: as they were, on a new stream, and after the lease."""
    name, grant = wire.admitted()
    shards = wire.opened.pool.shards
    heads = NUM_KV_HEADS // len(shards)
    streams = [Execute(shard, wire.opened, undo) for shard in shards]
    for stream in streams:
        stream.plan(1, name, grant)
        stream.write(1, heads)
        stream.close(1)
    ended = wire.finish(name)
    for stream in streams:
        if ended.HasField("grant"):
            stream.ask(apply_grants=compute_pb2.ApplyGrants(grants=[ended.grant]))
    forged = step_pb2.Grant.FromString(grant.SerializeToString())
    forged.body = forged.body[:-1] + bytes([forged.body[-1] ^ 1])
    for stream in streams:
        _must_refuse("a run of a closed plan", stream.write, 1, heads)
        _must_refuse("a forged grant", stream.plan, 2, name, forged)
    tried = 2 * len(streams)
    wire.close()
    # A shard that has not heard of the end yet may still execute: the blocks are nobody else's before it has. What is
    # written then is seen, if it is where it must not be, by whoever reads it.
    for attempt in range(2):
        time.sleep(0.2 * attempt)
        for stream, shard in zip(streams, shards, strict=True):
            tried += 2
            with suppress(KvplaneError, grpc.RpcError, StopIteration):
                stream.plan(3 + attempt, name, grant)
                stream.write(3 + attempt, heads)
            with suppress(KvplaneError, grpc.RpcError, StopIteration):
                late = Execute(shard, wire.opened, undo)
                late.plan(1, name, grant)
                late.write(1, heads)
    return tried


def arenas(wire: Wire, undo: ExitStack, seconds: float = 1.0) -> int:
    """Take every byte of tensor arenas that the shards give, and hold them for a while."""
    state = SessionState(wire.opened, "remote", Lease(10.0))
    taken = 0
    for shard in wire.opened.pool.shards:
        channel = grpc.insecure_channel(shard.address, options=channel_options())
        undo.callback(channel.close)
        for _ in range(64):
            try:
                attachment = attach(
                    ComputeServiceStub(channel),
                    state,
                    shard,
                    compute_pb2.ATTACH_PURPOSE_ARENA,
                    timeout_seconds=CALL_SECONDS,
                    arena_bytes=ARENA_BYTES,
                )
            except LimitExceededError:
                break
            undo.callback(attachment.close)
            taken += 1
        else:
            raise Accepted("64 arenas, and no limit")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
        wire.exchange(wire.step())
    return taken


def _must_refuse(what: str, act: Callable[..., None], *arguments: Any) -> None:
    try:
        act(*arguments)
    except KvplaneError:
        return
    raise Accepted(what)


ATTACKS: dict[str, Callable[..., int]] = {
    "duplicate": duplicate,
    "reorder": reorder,
    "replay": replay,
    "arenas": arenas,
}


def main() -> None:
    """See the module."""
    ttl, seed = float(sys.argv[1]), int(sys.argv[2])
    print(json.dumps({"kind": "started"}), flush=True)
    for number, text in enumerate(sys.stdin):
        word, *rest = text.split()
        answer: dict[str, Any] = {"kind": "attack", "attack": word, "tried": 0, "accepted": 0, "done": False}
        try:
            with ExitStack() as undo:
                wire = Wire(ttl, seed * 1000 + number, undo)
                answer["tried"] = ATTACKS[word](wire, undo, *map(float, rest))
                answer["done"] = True
        except Accepted as found:
            answer |= {"accepted": 1, "why": str(found)}
        except (KvplaneError, grpc.RpcError, StopIteration, TimeoutError) as error:
            answer["why"] = repr(error)[:300]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
