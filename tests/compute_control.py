"""A small control plane over the real wire: it drives shards as the contract says, and decides nothing by itself."""

import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc
import numpy as np

from kvplane.v1 import registry_pb2, step_pb2, types_pb2
from kvplane.v1.registry_pb2_grpc import PoolRegistryServiceServicer, add_PoolRegistryServiceServicer_to_server
from kvplane.wire import stamps
from kvplane.wire.grants import sign
from kvplane.wire.options import server_options
from kvplane.wire.packed import pack_u32, pack_u64

ANSWER_SECONDS = 20.0

Context = grpc.ServicerContext
Request = registry_pb2.ControlRequest
Response = registry_pb2.ControlResponse
Chunk = registry_pb2.InventoryRequest
Uploaded = registry_pb2.InventoryResponse
Announcement = registry_pb2.RegisterRequest


@dataclass(eq=False)
class Shard:
    """One registered shard."""

    register: registry_pb2.RegisterRequest
    registration_id: int
    outgoing: "queue.Queue[registry_pb2.ControlResponse | None]"
    acks: dict[int, "Future[registry_pb2.CommandAck]"] = field(default_factory=dict)
    sequence: int = 0
    streams: int = 0
    last_open: registry_pb2.ControlOpen | None = None


@dataclass(frozen=True)
class EngineSession:
    """What OpenSession would answer."""

    session_id: int
    lease_epoch: int
    secret: bytes
    mode: types_pb2.SessionMode.ValueType


Blocks = list[tuple[int, int]]
"""Ids and generations."""


def block_list(blocks: Blocks) -> types_pb2.BlockList:
    return types_pb2.BlockList(
        block_ids=pack_u32([block for block, _ in blocks]), generations=pack_u64([mark for _, mark in blocks])
    )


class ControlPlane(PoolRegistryServiceServicer):
    """Serves PoolRegistryService; tests call its methods."""

    def __init__(self, incarnation: int = 1, key: bytes = b"k" * 32) -> None:
        self.incarnation = incarnation
        self.key = key
        self.keep_pool = True
        self.pool_epoch = 0
        self.shards: dict[int, Shard] = {}
        self.events: queue.Queue[registry_pb2.ShardEvent] = queue.Queue()
        self.confirm_events = True
        self.all_events: list[registry_pb2.ShardEvent] = []
        self.inventory: dict[int, list[registry_pb2.InventoryRequest]] = {}
        self.opened = threading.Condition()
        self._registrations = itertools.count(1)
        self._sessions = itertools.count(1)
        self._grants: dict[int, int] = {}
        self._counter = itertools.count(1)
        self._server: grpc.Server | None = None

    # The wire

    def Register(self, request: Announcement, context: Context) -> registry_pb2.RegisterResponse:  # noqa: ARG002, N802
        old = self.shards.get(request.shard.rank)
        shard = Shard(request, next(self._registrations), queue.Queue())
        if old is not None and old.register.boot_id == request.boot_id:
            shard.sequence, shard.acks = old.sequence, old.acks
        self.shards[request.shard.rank] = shard
        return registry_pb2.RegisterResponse(
            incarnation=self.incarnation,
            registration_id=shard.registration_id,
            grant_key=self.key,
            ttl_ms=2000,
            keep_pool=self.keep_pool and request.HasField("held_pool"),
        )

    def Control(self, request_iterator: Iterator[Request], context: Context) -> Iterator[Response]:  # noqa: N802
        first = next(request_iterator)
        shard = next(each for each in self.shards.values() if each.registration_id == first.open.registration_id)
        shard.last_open = first.open

        def read() -> None:
            try:
                for message in request_iterator:
                    kind = message.WhichOneof("message")
                    if kind == "ack" and message.ack.sequence in shard.acks:
                        future = shard.acks[message.ack.sequence]
                        if not future.done():
                            future.set_result(message.ack)
                    elif kind == "event":
                        self.all_events.append(message.event)
                        self.events.put(message.event)
                        if self.confirm_events:
                            seen = registry_pb2.EventsSeen(event_id=message.event.event_id)
                            shard.outgoing.put(registry_pb2.ControlResponse(events_seen=seen))
            except grpc.RpcError:
                pass
            finally:
                shard.outgoing.put(None)

        threading.Thread(target=read, daemon=True).start()
        context.add_callback(lambda: shard.outgoing.put(None))
        with self.opened:
            shard.streams += 1
            self.opened.notify_all()
        while (message := shard.outgoing.get()) is not None:
            yield message

    def Inventory(self, request_iterator: Iterator[Chunk], context: Context) -> Uploaded:  # noqa: ARG002, N802
        chunks = list(request_iterator)
        self.inventory[chunks[0].inventory_id] = chunks
        return registry_pb2.InventoryResponse(num_rows=sum(len(chunk.rows) // 96 for chunk in chunks))

    # What tests do

    def start(self, address: str) -> "ControlPlane":
        self._server = grpc.server(ThreadPoolExecutor(16), options=server_options())
        servicer: Any = self
        add_PoolRegistryServiceServicer_to_server(servicer, self._server)
        self._server.add_insecure_port(address)
        self._server.start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def wait(self, count: int = 1, streams: int = 1) -> None:
        """Until so many shards have opened a control stream."""
        with self.opened:
            ready = self.opened.wait_for(
                lambda: sum(shard.streams >= streams for shard in self.shards.values()) >= count, ANSWER_SECONDS
            )
        assert ready, "no control stream was opened"

    def wait_event(self, kind: str) -> registry_pb2.ShardEvent:
        """The next event of a kind."""
        while True:
            event = self.events.get(timeout=ANSWER_SECONDS)
            if event.WhichOneof("event") == kind:
                return event

    def send(self, message: registry_pb2.ControlResponse, rank: int = 0) -> "Future[registry_pb2.CommandAck]":
        """Send one command to one shard."""
        shard = self.shards[rank]
        shard.sequence += 1
        message.incarnation = message.incarnation or self.incarnation
        message.boot_id = message.boot_id or shard.register.boot_id
        message.sequence = shard.sequence
        future: Future[registry_pb2.CommandAck] = Future()
        shard.acks[shard.sequence] = future
        shard.outgoing.put(message)
        return future

    def command(self, check: bool = True, **command: Any) -> registry_pb2.CommandAck:
        """Send a command to all shards and wait; returns the first shard's acknowledgement."""
        futures = [self.send(registry_pb2.ControlResponse(**command), rank) for rank in sorted(self.shards)]
        acks = [future.result(ANSWER_SECONDS) for future in futures]
        if check:
            assert all(ack.status.code == 0 for ack in acks), acks
        return acks[0]

    def create_pool(self, num_blocks: int, check: bool = True) -> registry_pb2.CommandAck:
        self.pool_epoch += 1
        segment = types_pb2.SegmentSpec(num_blocks=num_blocks)
        create = registry_pb2.CreatePool(pool_epoch=self.pool_epoch, num_blocks=num_blocks, segments=[segment])
        return self.command(check, create_pool=create)

    def open_session(
        self,
        mode: types_pb2.SessionMode.ValueType = types_pb2.SESSION_MODE_REMOTE,
        resume: EngineSession | None = None,
        max_sequences: int = 2048,
    ) -> EngineSession:
        session = EngineSession(
            resume.session_id if resume else next(self._sessions),
            resume.lease_epoch + 1 if resume else 1,
            secrets.token_bytes(32),
            mode,
        )
        served = registry_pb2.ServedSession(
            session_id=session.session_id,
            lease_epoch=session.lease_epoch,
            tenant_id="tenant",
            ttl_ms=10_000,
            mode=mode,
            max_sequences=max_sequences,
        )
        serve = registry_pb2.ServeSession(session=served, secret_sha256=sha256(session.secret).digest())
        self.command(serve_session=serve)
        return session

    def new_blocks(self, ids: list[int]) -> Blocks:
        """New occupants for blocks."""
        return [(block, stamps.generation(self.incarnation, next(self._counter))) for block in ids]

    def grant(
        self,
        session: EngineSession,
        tables: dict[int, tuple[int, Blocks]] | None = None,
        change: Callable[[step_pb2.GrantBody], None] | None = None,
    ) -> step_pb2.Grant:
        """The session's next grant: per sequence the first entry that changes, and the entries."""
        number = self._grants[session.session_id] = self._grants.get(session.session_id, 0) + 1
        body = step_pb2.GrantBody(
            pool_id="default",
            pool_epoch=self.pool_epoch,
            incarnation=self.incarnation,
            boot_ids=pack_u64([self.shards[rank].register.boot_id for rank in sorted(self.shards)]),
            session_id=session.session_id,
            lease_epoch=session.lease_epoch,
            number=number,
        )
        if tables:
            body.table_deltas.append(
                types_pb2.TableDelta(
                    blocks=block_list([block for _, blocks in tables.values() for block in blocks]),
                    sequence_ids=pack_u64(list(tables)),
                    starts=pack_u32([start for start, _ in tables.values()]),
                    counts=pack_u32([len(blocks) for _, blocks in tables.values()]),
                )
            )
        if change is not None:
            change(body)
        return sign(self.key, body)

    def reset_numbers(self, session: EngineSession, number: int = 0) -> None:
        """The next grant gets `number` + 1."""
        self._grants[session.session_id] = number

    def seal(self, blocks: Blocks, digests: list[bytes] | None = None) -> list[bool]:
        """Seal blocks on all shards; returns which the first shard sealed."""
        names = digests or [sha256(repr(block).encode()).digest() for block in blocks]
        ack = self.command(
            seal=registry_pb2.Seal(
                blocks=[block_list(blocks)],
                digests=b"".join(names),
                parent_digests=bytes(32 * len(blocks)),
                depths=pack_u32([0] * len(blocks)),
                namespace_ids=pack_u32([1] * len(blocks)),
            )
        )
        if not ack.success_bitmap:
            return [True] * len(blocks)
        bits = np.unpackbits(np.frombuffer(ack.success_bitmap, np.uint8), bitorder="little", count=len(blocks))
        return [bool(bit) for bit in bits]

    def fence(self, session: EngineSession, kill: bool = False) -> None:
        fence = registry_pb2.FenceSession(session_id=session.session_id, lease_epoch=session.lease_epoch, kill=kill)
        self.command(fence_session=fence)

    def upload(self, inventory_id: int = 1, rank: int = 0, **options: bool) -> list[registry_pb2.InventoryRequest]:
        """Ask a shard for its directory."""
        request = registry_pb2.RequestInventory(inventory_id=inventory_id, **options)
        ack = self.send(registry_pb2.ControlResponse(request_inventory=request), rank).result(ANSWER_SECONDS)
        assert ack.status.code == 0, ack
        return self.inventory[inventory_id]
