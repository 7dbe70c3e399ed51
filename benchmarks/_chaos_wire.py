"""A remote session and an Execute stream put together by hand, for a client that misbehaves."""

import queue
import random
import time
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
from _chaos_oracle import HEAD_DIM, NUM_LAYERS
from _chaos_prompts import VOCABULARY

from kvplane.client.control import GrpcCacheControl, connect
from kvplane.v1 import cache_pb2, compute_pb2, step_pb2, types_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire.errors import KvplaneError
from kvplane.wire.options import channel_options
from kvplane.wire.packed import pack_u32, pack_u64, unpack_u64
from kvplane.wire.status import from_status

CALL_SECONDS = 2.0
PROMPT_TOKENS = 20


class Wire:
    """A remote session whose messages are put together by hand."""

    def __init__(self, ttl: float, seed: int, undo: ExitStack) -> None:
        self.random = random.Random(seed)
        channel = connect()
        undo.callback(channel.close)
        self.control = GrpcCacheControl(channel, CALL_SECONDS)
        pool = self.control.get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool
        self.opened = self.control.open_session(
            cache_pb2.OpenSessionRequest(
                pool_id="default",
                model=pool.model,
                mode=types_pb2.SESSION_MODE_REMOTE,
                ttl_ms=round(1000 * ttl),
                max_sequences=8,
                engine_name="rogue",
            )
        )
        undo.callback(self.close)
        self.step_id = 0
        self.seen = 0
        self._serial = 0
        self.stream = self.control.step(
            cache_pb2.StreamOpen(
                session_id=self.opened.session_id,
                lease_epoch=self.opened.lease_epoch,
                stream_epoch=self.opened.stream_epoch,
            )
        )
        undo.callback(self.stream.close)
        self.receive()

    def close(self) -> None:
        """End the lease; a service that is away lets it run out."""
        request = cache_pb2.CloseSessionRequest(
            session_id=self.opened.session_id, lease_epoch=self.opened.lease_epoch, drained=True
        )
        try:
            self.control.close_session(request)
        except KvplaneError:
            return

    def step(self, **operations: Any) -> step_pb2.Step:
        """The next step."""
        self.step_id += 1
        return step_pb2.Step(
            step_id=self.step_id,
            last_seen_step=self.seen,
            completed_steps=pack_u64([self.seen]),
            **operations,
        )

    def admission(self) -> tuple[int, dict[str, Any]]:
        """A new sequence that reads and writes no cache, and the operation that admits it."""
        self._serial += 1
        name = self._serial << 32 | self._serial % 8
        tokens = [self.random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        new = step_pb2.NewSequence(
            sequence_id=name, tokens=pack_u32(tokens), read_cache=False, write_cache=False, request_name="rogue"
        )
        return name, {"admit": step_pb2.Admit(sequences=[new], order=pack_u64([name]))}

    def send(self, step: step_pb2.Step) -> None:
        """Without waiting."""
        self.stream.send(cache_pb2.StepRequest(step=step))

    def receive(self) -> cache_pb2.StepResponse:
        """The next message that is no notice."""
        while True:
            response = self.stream.receive(CALL_SECONDS)
            if not response.HasField("notice"):
                return response

    def exchange(self, step: step_pb2.Step) -> step_pb2.StepResult:
        """A step and its result. Raises what rejects it."""
        self.send(step)
        response = self.receive()
        if response.HasField("rejected"):
            raise from_status(response.rejected.status)
        self.seen = response.result.step_id
        return response.result

    def finish(self, name: int) -> step_pb2.StepResult:
        """End a sequence and let go of it."""
        reasons = pack_u32([step_pb2.FINISH_REASON_STOP])
        finish = step_pb2.Finish(sequence_ids=pack_u64([name]), reasons=reasons)
        self.exchange(self.step(finish=finish))
        return self.exchange(self.step())

    def admitted(self) -> tuple[int, step_pb2.Grant]:
        """A sequence that runs, and the grant of its table. Raises `TimeoutError` in a pool that has no room."""
        name, operation = self.admission()
        result = self.exchange(self.step(**operation))
        grants = [result.grant] if result.HasField("grant") else []
        deadline = time.monotonic() + CALL_SECONDS
        while name not in unpack_u64("admitted", result.admitted.sequence_ids).tolist():
            if time.monotonic() > deadline:
                raise TimeoutError("not admitted")
            time.sleep(0.02)
            result = self.exchange(self.step(admit=step_pb2.Admit(order=pack_u64([name]))))
            grants += [result.grant] if result.HasField("grant") else []
        return name, grants[-1]


class Execute:
    """An Execute stream of one shard."""

    def __init__(self, shard: types_pb2.Shard, opened: cache_pb2.OpenSessionResponse, undo: ExitStack) -> None:
        channel = grpc.insecure_channel(shard.address, options=channel_options())
        undo.callback(channel.close)
        self._outgoing: queue.SimpleQueue[compute_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        self._answers = ComputeServiceStub(channel).Execute(iter(self._outgoing.get, None), timeout=5 * CALL_SECONDS)
        undo.callback(self._outgoing.put, None)
        undo.callback(self._answers.cancel)
        self._requests = 0
        self.ask(
            open=compute_pb2.ExecuteOpen(
                session_id=opened.session_id, lease_epoch=opened.lease_epoch, session_secret=opened.session_secret
            )
        )

    def ask(self, **request: Any) -> compute_pb2.ExecuteResponse:
        """Send and wait. Raises what refuses it, and `grpc.RpcError`."""
        self._requests += 1
        self._outgoing.put(compute_pb2.ExecuteRequest(request_id=self._requests, **request))
        answer: compute_pb2.ExecuteResponse = next(self._answers)
        if answer.HasField("refused"):
            raise from_status(answer.refused)
        return answer

    def plan(self, plan_id: int, name: int, *grants: step_pb2.Grant) -> None:
        """A plan that writes the whole of a sequence."""
        self.ask(
            plan=compute_pb2.Plan(
                plan_id=plan_id,
                grants=grants,
                sequence_ids=pack_u64([name]),
                query_lengths=pack_u32([PROMPT_TOKENS]),
                kv_lengths=pack_u32([PROMPT_TOKENS]),
            )
        )

    def write(self, plan_id: int, shard_heads: int) -> None:
        """Not-a-numbers into every slot of the plan: whoever reads one of them sees it."""
        rows = np.full((PROMPT_TOKENS, shard_heads, HEAD_DIM), np.nan, np.float32)
        tensors = [
            compute_pb2.Tensor(role=role, dtype=types_pb2.DATA_TYPE_FLOAT32, shape=rows.shape, inline=rows.tobytes())
            for role in (types_pb2.TENSOR_ROLE_KEY, types_pb2.TENSOR_ROLE_VALUE)
        ]
        for layer in range(NUM_LAYERS):
            run = compute_pb2.Run(plan_id=plan_id, layer=layer, kind=compute_pb2.RUN_KIND_WRITE, tensors=tensors)
            self.ask(run=run)

    def close(self, plan_id: int) -> None:
        """End a plan."""
        self.ask(close=compute_pb2.ClosePlan(plan_id=plan_id))
