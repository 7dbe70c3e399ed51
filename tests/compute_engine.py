"""A remote engine and a running compute service, as tests and benchmarks use them."""

import asyncio
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import torch
from torch import Tensor

from compute_control import Blocks, EngineSession, block_list
from kvplane.compute.config import ComputeConfig
from kvplane.compute.dtypes import torch_dtype, wire_dtype
from kvplane.compute.server import ComputeServer
from kvplane.v1 import compute_pb2, step_pb2, types_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire.options import channel_options
from kvplane.wire.packed import pack_u32, pack_u64
from kvplane.wire.status import from_status

ANSWER_SECONDS = 20.0

WRITE_AND_ATTEND = compute_pb2.RUN_KIND_WRITE_AND_ATTEND
WRITE = compute_pb2.RUN_KIND_WRITE
ATTEND = compute_pb2.RUN_KIND_ATTEND
ROLES = {
    "query": types_pb2.TENSOR_ROLE_QUERY,
    "key": types_pb2.TENSOR_ROLE_KEY,
    "value": types_pb2.TENSOR_ROLE_VALUE,
    "out": types_pb2.TENSOR_ROLE_OUTPUT,
    "lse": types_pb2.TENSOR_ROLE_LSE,
}


def settings(folder: Path, name: str = "compute", **changes: Any) -> dict[str, Any]:
    """Configuration of a small shard whose sockets and memory are in `folder`."""
    values: dict[str, Any] = {
        "listen": [f"unix:{folder / name}.sock"],
        "cache": f"unix:{folder / 'cache.sock'}",
        "attach_socket": folder / f"{name}-attach.sock",
        "memory_folder": folder / "memory",
        "metrics_address": "",
        "weights_revision": "w",
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
        "kv_dtype": "float32",
        "block_tokens": 4,
        "max_blocks": 64,
        "pool_bytes": 1 << 26,
        "drain_seconds": 0.2,
        "threads": 1,
    }
    return values | changes


@contextmanager
def running(values: dict[str, Any]) -> Iterator[ComputeServer]:
    """A service in this process, on an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    async def make() -> ComputeServer:
        server = ComputeServer(ComputeConfig(**values))
        await server.start()
        return server

    try:
        server = call(make())
        try:
            yield server
        finally:
            call(server.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def flags(values: dict[str, Any]) -> list[str]:
    """The configuration as command line flags."""
    made = []
    for name, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            made += [f"--{name.replace('_', '-')}", str(each)]
    return made


def spawn(values: dict[str, Any], stderr: int | None = None) -> "subprocess.Popen[bytes]":
    """A service as a process of its own."""
    command = [sys.executable, "-m", "kvplane.compute", *flags(values)]
    return subprocess.Popen(command, env=dict(os.environ), stderr=stderr)


def tensor_of(message: compute_pb2.Tensor) -> Tensor:
    """A tensor that came inline."""
    dtype = torch_dtype(message.dtype, "dtype")
    data = torch.frombuffer(bytearray(message.inline), dtype=dtype) if message.inline else torch.empty(0, dtype=dtype)
    return data.view(tuple(message.shape))


def inline(name: str, tensor: Tensor) -> compute_pb2.Tensor:
    """A tensor that travels in the message."""
    return compute_pb2.Tensor(
        role=ROLES[name],
        dtype=wire_dtype(tensor.dtype),
        shape=tensor.shape,
        inline=tensor.contiguous().view(torch.uint8).numpy().tobytes(),
    )


def in_arena(name: str, shape: Sequence[int], dtype: torch.dtype, arena_id: int, offset: int) -> compute_pb2.Tensor:
    """A tensor that lies in an arena."""
    piece = compute_pb2.ArenaSlice(arena_id=arena_id, offset=offset)
    return compute_pb2.Tensor(role=ROLES[name], dtype=wire_dtype(dtype), shape=shape, arena=piece)


def run_of(plan_id: int, layer: int, tensors: dict[str, Tensor]) -> compute_pb2.Run:
    """A fused run with inline tensors."""
    given = [inline(name, tensor) for name, tensor in tensors.items()]
    return compute_pb2.Run(plan_id=plan_id, layer=layer, kind=WRITE_AND_ATTEND, tensors=given)


def read_request(session: EngineSession, blocks: Blocks, **more: Any) -> compute_pb2.ReadBlocksRequest:
    """A request for blocks."""
    return compute_pb2.ReadBlocksRequest(
        session_id=session.session_id,
        lease_epoch=session.lease_epoch,
        session_secret=session.secret,
        blocks=[block_list(blocks)],
        **more,
    )


class RemoteEngine:
    """One Execute stream of a session."""

    def __init__(self, address: str, session: EngineSession, open_now: bool = True) -> None:
        self.session = session
        self.channel = grpc.insecure_channel(address, options=channel_options())
        self.stub = ComputeServiceStub(self.channel)
        self._outgoing: queue.Queue[compute_pb2.ExecuteRequest | None] = queue.Queue()
        self._request_id = 0
        self._plan_id = 0
        self._responses = self.stub.Execute(iter(self._outgoing.get, None))
        if open_now:
            self.opened = self.ask(
                open=compute_pb2.ExecuteOpen(
                    session_id=session.session_id,
                    lease_epoch=session.lease_epoch,
                    session_secret=session.secret,
                )
            ).opened

    def send(self, **request: Any) -> int:
        """Send a request without waiting."""
        self._request_id += 1
        self._outgoing.put(compute_pb2.ExecuteRequest(request_id=self._request_id, **request))
        return self._request_id

    def receive(self, check: bool = True) -> compute_pb2.ExecuteResponse:
        """The next answer; a refusal is raised."""
        response = next(self._responses)
        if check and response.HasField("refused"):
            raise from_status(response.refused)
        return response

    def ask(self, **request: Any) -> compute_pb2.ExecuteResponse:
        """Send and wait."""
        request_id = self.send(**request)
        response = self.receive()
        assert response.request_id == request_id
        return response

    def apply(self, *grants: step_pb2.Grant) -> int:
        """Apply grants; returns the newest number."""
        return self.ask(apply_grants=compute_pb2.ApplyGrants(grants=grants)).grants_applied.last_grant

    def plan(self, sequences: dict[int, tuple[int, int]], *grants: step_pb2.Grant, **options: Any) -> int:
        """Open a plan of {sequence: (new tokens, length)}; returns its id."""
        self._plan_id += 1
        plan = compute_pb2.Plan(
            plan_id=self._plan_id,
            grants=grants,
            sequence_ids=pack_u64(list(sequences)),
            query_lengths=pack_u32([new for new, _ in sequences.values()]),
            kv_lengths=pack_u32([length for _, length in sequences.values()]),
            **options,
        )
        self.ask(plan=plan)
        return self._plan_id

    def run(
        self,
        plan_id: int,
        layer: int,
        kind: compute_pb2.RunKind.ValueType,
        *tensors: compute_pb2.Tensor,
        **named: Tensor,
    ) -> Tensor:
        """Execute a layer; returns the output when it comes inline."""
        given = [*tensors, *(inline(name, tensor) for name, tensor in named.items())]
        done = self.ask(run=compute_pb2.Run(plan_id=plan_id, layer=layer, kind=kind, tensors=given)).run
        results = {each.role: each for each in done.tensors}
        out = results.get(types_pb2.TENSOR_ROLE_OUTPUT)
        return tensor_of(out) if out is not None and out.WhichOneof("location") == "inline" else torch.empty(0)

    def close_plan(self, plan_id: int) -> None:
        self.ask(close=compute_pb2.ClosePlan(plan_id=plan_id))

    def close(self) -> None:
        self._outgoing.put(None)
        self._responses.cancel()
        self.channel.close()
