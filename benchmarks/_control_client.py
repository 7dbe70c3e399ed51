"""An engine's side of the control plane for benchmarks: an aio client that builds and parses every step with numpy."""

import asyncio
from dataclasses import dataclass, field

import grpc
import numpy as np

from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.v1.cache_pb2_grpc import CacheServiceStub
from kvplane.wire.options import channel_options
from kvplane.wire.packed import pack_u32, pack_u64

BLOCK_TOKENS = 16
POOL = "default"


def model() -> types_pb2.ModelIdentity:
    """The model of the benchmark's pool."""
    return types_pb2.ModelIdentity(
        weights_revision="w1", tokenizer_revision="t1", kv_dtype="bfloat16", block_tokens=BLOCK_TOKENS, hash_version=1
    )


@dataclass(slots=True)
class Tables:
    """Block tables as an engine keeps them: `blocks` of shape [sequences, max blocks]."""

    blocks: np.ndarray
    changed: int = 0

    def apply(self, result: step_pb2.StepResult) -> None:
        """Write a result's deltas into the tables."""
        for delta in result.table_deltas:
            rows = (np.frombuffer(delta.sequence_ids, "<u8") & np.uint64(0xFFFFFFFF)).astype(np.int64)
            starts = np.frombuffer(delta.starts, "<u4").astype(np.int64)
            counts = np.frombuffer(delta.counts, "<u4").astype(np.int64)
            ids = np.frombuffer(delta.blocks.block_ids, "<u4")
            if len(ids) == len(rows):
                self.blocks[rows, starts] = ids
            else:
                within = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
                self.blocks[np.repeat(rows, counts), np.repeat(starts, counts) + within] = ids
            self.changed += len(ids)


@dataclass(slots=True)
class Engine:
    """One session with `num_sequences` running sequences that decode one token a step."""

    address: str
    num_sequences: int
    prompt_tokens: int = 256
    seed: int = 0
    last_request: bytes = b""
    last_response: bytes = b""
    _step: int = 0
    _stream: grpc.aio.StreamStreamCall[cache_pb2.StepRequest, cache_pb2.StepResponse] | None = None
    _channel: grpc.aio.Channel | None = None
    _ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    _known: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    tables: Tables = field(default_factory=lambda: Tables(np.zeros((0, 0), np.uint32)))

    async def start(self) -> None:
        """Open a session and its stream, and admit the sequences with staggered lengths."""
        self._channel = grpc.aio.insecure_channel(self.address, options=channel_options())
        stub = CacheServiceStub(self._channel)
        opened: cache_pb2.OpenSessionResponse = await stub.OpenSession(
            cache_pb2.OpenSessionRequest(
                pool_id=POOL,
                model=model(),
                mode=types_pb2.SESSION_MODE_ATTACHED,
                max_sequences=max(self.num_sequences, 1),
                ttl_ms=120_000,
            ),
            timeout=30,
        )
        self._stream = stub.Step()
        opening = cache_pb2.StreamOpen(
            session_id=opened.session_id, lease_epoch=opened.lease_epoch, stream_epoch=opened.stream_epoch
        )
        await self._stream.write(cache_pb2.StepRequest(open=opening))
        await self._stream.read()
        rng = np.random.default_rng(self.seed)
        lengths = self.prompt_tokens + np.arange(self.num_sequences) % BLOCK_TOKENS
        self._ids = (np.uint64(1) << np.uint64(32)) + np.arange(self.num_sequences, dtype=np.uint64)
        self._known = lengths.astype(np.uint32)
        self.tables = Tables(np.zeros((max(self.num_sequences, 1), 16_384), np.uint32))
        for first in range(0, self.num_sequences, 256):
            part = slice(first, first + 256)
            new = [
                step_pb2.NewSequence(
                    sequence_id=int(self._ids[row]),
                    tokens=pack_u32(rng.integers(0, 128_000, lengths[row], dtype=np.uint32)),
                )
                for row in range(*part.indices(self.num_sequences))
            ]
            admit = step_pb2.Admit(sequences=new, order=pack_u64(self._ids[part]))
            result = await self.exchange(step_pb2.Step(admit=admit))
            assert len(result.admitted.sequence_ids) == 8 * len(new), result.state_changes
        if self.num_sequences:
            await self.exchange(
                step_pb2.Step(
                    commit=step_pb2.Commit(sequence_ids=pack_u64(self._ids), num_tokens=pack_u32(self._known)),
                    extend=step_pb2.Extend(sequence_ids=pack_u64(self._ids), num_slots=pack_u32(self._known + 2)),
                )
            )

    def build(self) -> cache_pb2.StepRequest:
        """The next decode step of all sequences, written in place: nested messages in constructors are copied."""
        committed = self._known
        self._known = self._known + np.uint32(1)
        request = cache_pb2.StepRequest()
        advance = request.step.advance
        advance.sequence_ids = self._ids.tobytes()
        advance.tokens = np.full(self.num_sequences, 7 + self._step, np.uint32).tobytes()
        advance.num_committed = committed.tobytes()
        advance.num_slots = (self._known + np.uint32(2)).tobytes()
        self._number(request.step)
        return request

    async def send(self, request: cache_pb2.StepRequest) -> None:
        """Send without waiting for the answer."""
        assert self._stream is not None
        await self._stream.write(request)

    async def receive(self) -> step_pb2.StepResult:
        """The next result, applied to the tables."""
        assert self._stream is not None
        response = await self._stream.read()
        assert isinstance(response, cache_pb2.StepResponse)
        if not response.HasField("result"):
            raise RuntimeError(f"no result: {response}")
        self.tables.apply(response.result)
        return response.result

    async def exchange(self, step: step_pb2.Step) -> step_pb2.StepResult:
        """Send a step and wait for its result."""
        await self.send(self._request(step))
        return await self.receive()

    async def decode(self) -> step_pb2.StepResult:
        """One decode step."""
        await self.send(self.build())
        return await self.receive()

    async def sample(self) -> tuple[bytes, bytes]:
        """The bytes of a typical decode step and its answer."""
        request = self.build()
        await self.send(request)
        assert self._stream is not None
        response = await self._stream.read()
        assert isinstance(response, cache_pb2.StepResponse)
        self.tables.apply(response.result)
        return request.SerializeToString(), response.SerializeToString()

    async def stop(self) -> None:
        """Leave without closing the session: the server is about to go."""
        if self._stream is not None:
            self._stream.cancel()
        if self._channel is not None:
            await self._channel.close()

    def _request(self, step: step_pb2.Step) -> cache_pb2.StepRequest:
        self._number(step)
        return cache_pb2.StepRequest(step=step)

    def _number(self, step: step_pb2.Step) -> None:
        self._step += 1
        step.step_id = self._step
        step.last_seen_step = max(0, self._step - 1)
        step.completed_steps = max(0, self._step - 2).to_bytes(8, "little")


async def settle() -> None:
    """Let the server send its seals."""
    await asyncio.sleep(0.05)
