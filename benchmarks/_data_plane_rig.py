"""What the parts of `data_plane.py` share: a compute service as a process, an echo, streams, tensors, plans."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from compute_attached import Attached, attach
from compute_control import ControlPlane, EngineSession
from compute_engine import WRITE, RemoteEngine, in_arena, settings, spawn
from kvplane.v1 import compute_pb2
from kvplane.wire.options import server_options
from kvplane.wire.packed import pack_u32, pack_u64

QUERY_HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
BLOCK_TOKENS = 16
BATCH, CONTEXT = 8, 1024
DTYPE = torch.bfloat16
ECHO = "/kvplane.benchmark.Echo/Echo"


async def serve_echo(address: str) -> None:
    """Answer every message of a stream with so many bytes as its first one says, until standard input ends."""

    async def echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        answer = b""
        async for request in requests:
            if not answer:
                answer = bytes(int(request))
            await context.write(answer)

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(echo)
    server = grpc.aio.server(options=server_options())
    name, method = ECHO.strip("/").split("/")
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {method: handler})])
    server.add_insecure_port(address)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


@contextmanager
def service(folder: Path, **changes: Any) -> Iterator[tuple[ControlPlane, str]]:
    """A compute service in a process of its own, and a control plane that has created its pool."""
    folder.mkdir()
    values = settings(folder, memory_folder=f"/dev/shm/{folder.parent.name}-{folder.name}", log_level="error")
    del values["threads"]
    values |= {"pool_bytes": 4 << 30, "block_tokens": BLOCK_TOKENS, **changes}
    control = ControlPlane().start(values["cache"])
    process = spawn(values)
    try:
        control.wait()
        control.create_pool(values["max_blocks"])
        yield control, values["listen"][0]
    finally:
        process.terminate()
        process.wait()
        control.stop()
        subprocess.run(["rm", "-rf", str(values["memory_folder"])], check=True)


def rows(tokens: int, heads: int, dim: int = HEAD_DIM, dtype: torch.dtype = DTYPE) -> Tensor:
    """Random rows of tokens."""
    return torch.randn(tokens, heads, dim).to(dtype)


def arena_of(address: str, session: EngineSession, num_bytes: int) -> Attached:
    """A tensor arena."""
    purpose = compute_pb2.ATTACH_PURPOSE_ARENA
    secret = session.secret
    return attach(address, session.session_id, session.lease_epoch, secret, purpose=purpose, arena_bytes=num_bytes)


def place(arena: Attached, tensors: dict[str, Tensor]) -> list[compute_pb2.Tensor]:
    """Put tensors into an arena one after the other, the output's room last."""
    memory, offset, made = np.frombuffer(arena.mappings[0], np.uint8), 0, []
    for name, tensor in tensors.items():
        memory[offset : offset + tensor.nbytes] = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        made.append(in_arena(name, tensor.shape, tensor.dtype, arena.reply.arena_id, offset))
        offset += -(-tensor.nbytes // 64) * 64
    return made


class Stream:
    """An aio bidi stream: one message, one answer."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._next_id = 0

    async def ask(self, message: Any) -> Any:
        """Send and wait."""
        await self._call.write(message)
        return await self._call.read()

    async def request(self, **request: Any) -> compute_pb2.ExecuteResponse:
        """The same with a numbered request; a refusal ends the benchmark."""
        return await self.again(compute_pb2.ExecuteRequest(**request))

    async def again(self, request: compute_pb2.ExecuteRequest) -> compute_pb2.ExecuteResponse:
        """The same with a message that is used again and again, as an engine does for the layers of a model."""
        self._next_id += 1
        request.request_id = self._next_id
        response: compute_pb2.ExecuteResponse = await self.ask(request)
        assert not response.HasField("refused"), response
        return response

    async def open(self, session: EngineSession) -> "Stream":
        """Bind it to a session."""
        opening = compute_pb2.ExecuteOpen(
            session_id=session.session_id, lease_epoch=session.lease_epoch, session_secret=session.secret
        )
        await self.request(open=opening)
        return self


def timed(call: Callable[[], object]) -> float:
    """Milliseconds a call took."""
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def plan_message(plan_id: int, sequences: Mapping[int, tuple[int, int]]) -> compute_pb2.Plan:
    """A plan of {sequence: (new tokens, length)}."""
    return compute_pb2.Plan(
        plan_id=plan_id,
        sequence_ids=pack_u64(list(sequences)),
        query_lengths=pack_u32([new for new, _ in sequences.values()]),
        kv_lengths=pack_u32([length for _, length in sequences.values()]),
    )


def prefill(engine: RemoteEngine, count: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, step: int) -> None:
    """Write `tokens` tokens of `count` sequences into every layer, `step` sequences at a time."""
    for first in range(0, count, step):
        plan = engine.plan(dict.fromkeys(range(first, min(first + step, count)), (tokens, tokens)))
        for layer in range(LAYERS):
            key = rows(tokens * (min(first + step, count) - first), heads, dim, dtype)
            engine.run(plan, layer, WRITE, key=key, value=key)
        engine.close_plan(plan)


LAYERS = 2
"""One more than is run: a plan whose last layer is not written can be run again and again."""
