"""A real shard without tensors: a directory and stamps in memory, a real registration, a real control stream.

It carries commands out as the contract says (generation and stamp compared before a seal, stored acknowledgements,
events repeated until confirmed) and does what a test asks for: hold its acknowledgements back, cut its stream, come
back with or without its memory, report processes.

`python tests/tensorless_shard.py ADDRESS POOL NUM_BLOCKS BLOCK_TOKENS` runs one until its standard input ends. A line
there is `IDS GENERATIONS`, packed u32 and u64 in hex: an engine stamps these blocks. The answer is an empty line.
"""

import queue
import random
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import grpc
import numpy as np

from kvplane.v1 import registry_pb2, types_pb2
from kvplane.v1.registry_pb2_grpc import PoolRegistryServiceStub
from kvplane.wire import directory, stamps, tables
from kvplane.wire.errors import KvplaneError
from kvplane.wire.identity import ModelIdentity
from kvplane.wire.options import channel_options
from kvplane.wire.packed import unpack_u32, unpack_u64
from kvplane.wire.status import from_rpc_error

CHUNK_BLOCKS = 16_384
"""Blocks in one message of an inventory."""


def model_message(block_tokens: int = 16, weights: str = "w1") -> types_pb2.ModelIdentity:
    """The model that tests serve."""
    return types_pb2.ModelIdentity(
        weights_revision=weights,
        tokenizer_revision="t1",
        kv_dtype="bfloat16",
        block_tokens=block_tokens,
        hash_version=1,
    )


def full_attention(block_tokens: int = 16) -> types_pb2.GroupSpec:
    """One group of full attention."""
    return types_pb2.GroupSpec(full_attention=types_pb2.FullAttention(), block_tokens=block_tokens)


class TensorlessShard:
    """One shard, in threads of its own."""

    def __init__(
        self,
        address: str,
        pool_id: str = "default",
        *,
        rank: int = 0,
        world_size: int = 1,
        num_blocks: int = 64,
        block_tokens: int = 16,
        model: types_pb2.ModelIdentity | None = None,
        group: types_pb2.GroupSpec | None = None,
    ) -> None:
        self._stopped = False
        self._address = address
        self._dial()
        self._model = model or model_message(block_tokens)
        self._group = group or full_attention(block_tokens)
        self._shape = types_pb2.ShardSpec(rank=rank, world_size=world_size)
        self._pool_id, self._num_blocks = pool_id, num_blocks
        self.boot_id = random.getrandbits(63) | 1
        self.incarnation = 0
        self.pool_epoch = 0
        self.view: directory.Directory | None = None
        self.stamps = np.zeros(0, np.uint64)
        self.sealed_commands = 0
        self.fenced: set[int] = set()
        self.sessions: dict[int, registry_pb2.ServedSession] = {}
        self.hold_maps: dict[tuple[int, int], set[int]] = {}
        """Blocks by session and process id."""
        self.granted: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """Tables of remote sequences by session and sequence: what their engine has handed over."""
        self.uploads = 0
        """Inventories that were asked for."""
        self.stamps_itself = True
        """Whether a seal stamps its blocks; else the test does, with `stamp`."""
        self.error: KvplaneError | None = None
        self._acks: dict[int, registry_pb2.CommandAck] = {}
        self._events: dict[int, registry_pb2.ShardEvent] = {}
        self._last_event = 0
        self._held: list[registry_pb2.CommandAck] | None = None
        self.fails: set[str] = set()
        """Kinds of commands that this shard cannot carry out."""
        self.heartbeat_seconds: float | None = 0.5
        """None: silent, though connected."""
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[registry_pb2.ControlRequest | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._registration_id = 0

    def _held_pool(self, view: directory.Directory) -> registry_pb2.HeldPool:
        rows = view.namespaces
        return registry_pb2.HeldPool(
            pool_epoch=self.pool_epoch,
            incarnation=self.incarnation,
            num_blocks=len(view.blocks),
            model_identity=view.model_identity,
            namespaces=[
                registry_pb2.NamespaceRow(
                    namespace_id=int(rows[index]["namespace_id"]),
                    root_digest=rows[index]["root"].tobytes(),
                    tenant_id=tables.text(rows, index, "tenant").decode(),
                    version=int(rows[index]["version"]),
                    identity=tables.text(rows, index, "identity"),
                )
                for index in tables.used(rows)
            ],
            sessions=self.sessions.values(),
        )

    def _dial(self) -> None:
        self._channel = grpc.insecure_channel(self._address, options=channel_options())
        self._stub = PoolRegistryServiceStub(self._channel)

    # What a test does with it

    def register(self) -> registry_pb2.RegisterResponse:
        """Announce the shard. Raises `KvplaneError`."""
        request = registry_pb2.RegisterRequest(
            pool_id=self._pool_id,
            boot_id=self.boot_id,
            address="unix:/nowhere",
            device=registry_pb2.Device(kind=registry_pb2.DEVICE_KIND_CPU, name="none"),
            shard=self._shape,
            model=self._model,
            groups=[self._group],
            directory_version=directory.VERSION,
            max_blocks=self._num_blocks,
            ttl_ms=10_000,
            features=["seal", "fence"],
        )
        if self.view is not None:
            request.held_pool.CopyFrom(self._held_pool(self.view))
        try:
            response = self._stub.Register(request, timeout=10)
        except grpc.RpcError as failed:
            raise from_rpc_error(failed) from None
        self._follow(response.incarnation)
        self._registration_id = response.registration_id
        return response

    def connect(self) -> None:
        """Open the control stream."""
        requests: queue.SimpleQueue[registry_pb2.ControlRequest | None] = queue.SimpleQueue()
        self._requests = requests
        self._send(
            open=registry_pb2.ControlOpen(
                registration_id=self._registration_id, last_sequence=max(self._acks, default=0)
            )
        )
        for event in self._events.values():
            self._send(event=event)
        self._gone.set()
        self._gone = threading.Event()
        threading.Thread(target=self._beat, args=(self._gone,), daemon=True).start()
        self._call = self._stub.Control(iter(requests.get, None))
        self._reader = threading.Thread(target=self._read, args=(self._call,), daemon=True)
        self._reader.start()

    def start(self) -> "TensorlessShard":
        """Register and connect."""
        self.register()
        self.connect()
        return self

    def keep_connected(self) -> None:
        """Register and connect from a thread of its own, again whenever the stream breaks, as services do."""

        def follow() -> None:
            while not self._stopped:
                try:
                    self.start()
                except KvplaneError:
                    time.sleep(0.05)
                    # A channel that could not connect waits longer and longer before it tries again.
                    self._channel.close()
                    self._dial()
                    continue
                assert self._reader is not None
                self._reader.join()
                self._gone.set()
                self._requests.put(None)
                time.sleep(0.02)

        threading.Thread(target=follow, daemon=True).start()

    def cut(self) -> None:
        """Cut the control stream; memory and boot stay."""
        self._gone.set()
        self._requests.put(None)
        self._call.cancel()
        if self._reader is not None:
            self._reader.join()

    def follow(self, address: str) -> None:
        """Register with another control plane, tell the present one that it is superseded, and go over."""
        old = (self._requests, self._reader, self._gone)
        self._address = address
        self._dial()
        self.register()
        self._event(superseded=registry_pb2.Superseded(incarnation=self.incarnation))
        self._events.clear()
        old[2].set()
        if old[1] is not None:
            old[1].join()
        old[0].put(None)
        self.connect()

    def restart(self, keep: bool = False) -> None:
        """Come back as a new boot, with empty memory or with what was there."""
        self.cut()
        self.boot_id = random.getrandbits(63) | 1
        self._acks = {}
        if not keep:
            self.view = None
        self.start()

    def stop(self) -> None:
        """Leave."""
        self._stopped = True
        self.cut()
        self._channel.close()

    def hold_acks(self) -> None:
        """Keep acknowledgements back from now on."""
        with self._lock:
            self._held = []

    def release_acks(self) -> None:
        """Send what was kept back."""
        with self._lock:
            held, self._held = self._held or [], None
        for ack in held:
            self._send(ack=ack)

    def attached(self, session_id: int, pid: int) -> None:
        """Report that a process has mapped the pool."""
        process = registry_pb2.ProcessRef(pid=pid, start_ticks=1)
        if session_id in self.sessions:
            self.sessions[session_id].processes.append(process)
        self.hold_maps[session_id, pid] = set()
        self._event(session_attached=registry_pb2.SessionAttached(session_id=session_id, process=process))

    def process_gone(self, session_id: int, pid: int) -> None:
        """Report that a process is gone."""
        process = registry_pb2.ProcessRef(pid=pid, start_ticks=1)
        self.hold_maps.pop((session_id, pid), None)
        self._event(process_gone=registry_pb2.ProcessGone(session_id=session_id, process=process))

    def drained(self, session_id: int, lease_epoch: int) -> None:
        """Report that nothing of a session runs any more."""
        self._event(session_drained=registry_pb2.SessionDrained(session_id=session_id, lease_epoch=lease_epoch))

    def damaged(self, block_ids: list[int]) -> None:
        """Report that blocks failed their checksum."""
        blocks = types_pb2.BlockList(block_ids=np.array(block_ids, "<u4").tobytes())
        self._event(blocks_damaged=registry_pb2.BlocksDamaged(blocks=[blocks]))

    def stamp(self, block_ids: np.ndarray, generations: np.ndarray) -> None:
        """What the engine does before the first byte of a new occupant: I3."""
        self.stamps[block_ids] = np.maximum(self.stamps[block_ids], generations)

    def sealed_blocks(self) -> list[int]:
        """Ids of the blocks whose rows count."""
        assert self.view is not None
        return [int(block) for block in np.flatnonzero(directory.sealed_mask(self.view.blocks, self.stamps))]

    # The other end of the contract

    def _send(self, **message: object) -> None:
        self._requests.put(registry_pb2.ControlRequest(incarnation=self.incarnation, boot_id=self.boot_id, **message))  # type: ignore[arg-type]

    def _event(self, **event: object) -> None:
        self._last_event += 1
        message = registry_pb2.ShardEvent(event_id=self._last_event, **event)  # type: ignore[arg-type]
        self._events[self._last_event] = message
        self._send(event=message)

    def _beat(self, gone: threading.Event) -> None:
        while not gone.wait(self.heartbeat_seconds or 0.1):
            if self.heartbeat_seconds is not None:
                self._send(heartbeat=registry_pb2.ShardHeartbeat())

    def _read(self, call: object) -> None:
        try:
            for command in call:  # type: ignore[attr-defined]
                self._carry_out(command)
        except grpc.RpcError as failed:
            self.error = from_rpc_error(failed)

    def _follow(self, incarnation: int) -> None:
        if incarnation > self.incarnation:
            # Numbers of commands count under their incarnation.
            self.incarnation, self._acks = incarnation, {}
            if self.view is not None:
                self.view.header["incarnation"] = incarnation

    def _carry_out(self, command: registry_pb2.ControlResponse) -> None:
        if command.incarnation < self.incarnation or command.boot_id != self.boot_id:
            return
        self._follow(command.incarnation)
        kind = command.WhichOneof("command")
        if kind == "events_seen":
            for number, each in self._events.items():
                gone = each.process_gone
                if number <= command.events_seen.event_id and gone.session_id in self.sessions:
                    processes = self.sessions[gone.session_id].processes
                    left = [known for known in processes if known != gone.process]
                    del processes[:]
                    processes.extend(left)
            self._events = {
                number: each for number, each in self._events.items() if number > command.events_seen.event_id
            }
            return
        ack = self._acks.get(command.sequence)
        if ack is None:
            ack = registry_pb2.CommandAck(sequence=command.sequence)
            if kind in self.fails:
                ack.status.code, ack.status.message = 8, f"{kind} failed as the test wants"
            elif kind == "create_pool":
                self._create(command.create_pool)
            elif kind == "seal":
                ack.success_bitmap = self._seal(command.seal)
            elif kind == "put_namespaces" and self.view is not None:
                for row in command.put_namespaces.namespaces:
                    tables.put_namespace(
                        self.view.namespaces,
                        row.namespace_id,
                        row.version,
                        row.root_digest,
                        row.tenant_id,
                        row.identity,
                    )
            elif kind == "serve_session":
                self._serve(command.serve_session.session)
            elif kind == "fence_session":
                self.fenced.add(command.fence_session.session_id)
                if command.fence_session.session_id in self.sessions:
                    self.sessions[command.fence_session.session_id].fenced = True
            elif kind == "forget_session":
                self.sessions.pop(command.forget_session.session_id, None)
            elif kind == "void_rows" and self.view is not None:
                ids, generations = _blocks(command.void_rows.blocks)
                same = self.view.blocks["generation"][ids] == generations
                directory.void(self.view.blocks, ids[same])
            elif kind == "request_inventory":
                self._upload(command.request_inventory)
            self._acks[command.sequence] = ack
        with self._lock:
            if self._held is not None:
                self._held.append(ack)
                return
        self._send(ack=ack)

    def _serve(self, session: registry_pb2.ServedSession) -> None:
        before = self.sessions.get(session.session_id)
        if before is not None:
            session.processes.extend(before.processes)
        self.sessions[session.session_id] = session

    def _upload(self, request: registry_pb2.RequestInventory) -> None:
        assert self.view is not None
        self.uploads += 1

        def chunk(first: int, **content: Any) -> registry_pb2.InventoryRequest:
            return registry_pb2.InventoryRequest(
                inventory_id=request.inventory_id,
                registration_id=self._registration_id,
                boot_id=self.boot_id,
                first_block=first,
                **content,
            )

        chunks = []
        for first in range(0, len(self.view.blocks), CHUNK_BLOCKS):
            part = slice(first, first + CHUNK_BLOCKS)
            rows = b"" if request.omit_rows else self.view.blocks[part].tobytes()
            stamped = self.stamps[part].tobytes() if request.stamps else b""
            chunks.append(chunk(first, rows=rows, stamps=stamped))
        last = chunk(len(self.view.blocks), last=True)
        for (session_id, pid), blocks in self.hold_maps.items() if request.hold_maps else ():
            bits = np.zeros(len(self.view.blocks), np.bool_)
            bits[list(blocks)] = True
            process = registry_pb2.ProcessRef(pid=pid, start_ticks=1)
            bitmap = np.packbits(bits, bitorder="little").tobytes()
            last.hold_maps.add(session_id=session_id, process=process, bitmap=bitmap)
        for (session_id, sequence_id), table in self.granted.items():
            named = types_pb2.BlockList(
                block_ids=np.array([block for block, _ in table], "<u4").tobytes(),
                generations=np.array([generation for _, generation in table], "<u8").tobytes(),
            )
            last.granted_tables.add(session_id=session_id, sequence_id=sequence_id, blocks=[named])
        self._stub.Inventory(iter([*chunks, last]), timeout=20)

    def _create(self, command: registry_pb2.CreatePool) -> None:
        model = ModelIdentity(
            self._model.weights_revision, self._model.tokenizer_revision, self._model.kv_dtype, self._model.block_tokens
        )
        spec = directory.DirectorySpec(
            command.num_blocks, self._model.block_tokens, model, command.pool_epoch, self.boot_id, self.incarnation
        )
        self.pool_epoch = command.pool_epoch
        self.view = directory.format_directory(memoryview(bytearray(spec.num_bytes)), spec)
        memory = memoryview(bytearray(stamps.stamps_bytes(command.num_blocks)))
        self.stamps = stamps.format_stamps(memory, command.num_blocks, command.pool_epoch)

    def _seal(self, command: registry_pb2.Seal) -> bytes:
        assert self.view is not None
        self.sealed_commands += 1
        ids, generations = _blocks(command.blocks)
        rows = np.zeros(len(ids), directory.BLOCK_ROW)
        rows["generation"] = generations
        rows["filled"] = self._model.block_tokens
        rows["depth"] = unpack_u32("depths", command.depths)
        rows["namespace_id"] = unpack_u32("namespaces", command.namespace_ids)
        rows["digest"] = np.frombuffer(command.digests, "V32")
        rows["parent"] = np.frombuffer(command.parent_digests, "V32")
        if self.stamps_itself:
            # Nobody writes bytes here, so the stamp is set as an engine that wrote them would have.
            self.stamp(ids, rows["generation"])
        good = (rows["generation"] == self.stamps[ids]) & (rows["generation"] >= self.view.blocks["generation"][ids])
        directory.seal(self.view.blocks, ids[good], rows[good])
        return np.packbits(good, bitorder="little").tobytes()


def _blocks(lists: Iterable[types_pb2.BlockList]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and generations of all lists."""
    named = list(lists)
    ids = np.concatenate([unpack_u32("ids", each.block_ids) for each in named])
    return ids, np.concatenate([unpack_u64("generations", each.generations) for each in named])


def main() -> None:
    """Run a shard until standard input ends, dialling again whenever the control plane is away."""
    address, pool_id, num_blocks, block_tokens = sys.argv[1:5]
    shard = TensorlessShard(address, pool_id, num_blocks=int(num_blocks), block_tokens=int(block_tokens))
    shard.keep_connected()
    for line in sys.stdin:
        ids, generations = (bytes.fromhex(part) for part in line.split())
        shard.stamp(unpack_u32("ids", ids), unpack_u64("generations", generations))
        print(flush=True)


if __name__ == "__main__":
    main()
