"""Engines outside the containers, on published ports: the example, one that lives through a crash, a refused step."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import torch

from compose_stack.shell import FailedError
from kvplane.client import HitReason, Session
from kvplane.client.compute import Compute, open_compute
from kvplane.client.control import GrpcCacheControl, connect
from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire.errors import UnavailableError
from kvplane.wire.packed import pack_u32, pack_u64

ADDRESS = "localhost:50051"
PROMPT = np.arange(5000, 5064, dtype=np.uint32)
BLOCK = 16


def example(root: Path, *arguments: str) -> str:
    """Run the example engine in a process of its own; returns its report. Raises `FailedError`."""
    done = subprocess.run(
        [sys.executable, root / "deploy/example/engine.py", "--mode", "remote", "--address", ADDRESS, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode or "all right" not in done.stdout:
        raise FailedError(f"the example engine ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip().splitlines()[-1]


def live_through(crash: Callable[[], None]) -> tuple[float, int]:
    """A session with one running sequence and one published prefix, over a crash of the cache service: the sequence
    goes on with its table and its bytes, the prefix is hit. Returns seconds until it went on, and tokens hit.

    Raises `FailedError`, and what the SDK raises.
    """
    with Session.open(mode="remote", address=ADDRESS, timeout=60.0) as session, open_compute(session) as compute:
        first = _prefill(session, compute, PROMPT)
        table = session.sequences
        blocks = table.blocks[table.row(first), : len(PROMPT) // BLOCK].copy()
        generations = table.generations[table.row(first), : len(PROMPT) // BLOCK].copy()
        before = _attend(compute, first)
        crash()
        start = time.monotonic()
        draft = session.draft()
        draft.extend(first, len(PROMPT) + 1)
        session.run(draft)
        seconds = time.monotonic() - start
        row = table.row(first)
        if not (
            np.array_equal(table.blocks[row, : len(blocks)], blocks)
            and np.array_equal(table.generations[row, : len(blocks)], generations)
        ):
            raise FailedError("the running sequence has other blocks than before")
        if not torch.equal(before, _attend(compute, first)):
            raise FailedError("the running sequence reads other bytes than before")
        # Nobody holds the prefix any more: the hit is of what is published.
        draft = session.draft()
        draft.finish([first])
        session.run(draft)
        draft = session.draft()
        second = draft.admit(PROMPT)
        result = session.run(draft)
        while not result.admitted:
            draft = session.draft()
            draft.readmit(second)
            result = session.run(draft)
        admission = result.admitted[0]
        if admission.hit_reason != HitReason.FULL:
            raise FailedError(f"the published prefix is not hit: {admission.hit_reason.name}")
        draft = session.draft()
        draft.finish([second])
        session.run(draft)
        return seconds, admission.cached_tokens


def shut_out(authority: Path | None) -> None:
    """No session opens over plain TCP, or over TLS without a certificate of one's own. Raises `FailedError`."""
    credentials = grpc.ssl_channel_credentials(authority.read_bytes()) if authority else None
    try:
        Session.open(mode="remote", address=ADDRESS, credentials=credentials, timeout=2.0).close()
    except UnavailableError:
        return
    raise FailedError(f"an engine came in over {'TLS without a certificate' if authority else 'plain TCP'}")


def refused_step() -> None:
    """A step that no engine may send, past the SDK, which would not: the service has to refuse and count it."""
    with connect(ADDRESS) as channel:
        control = GrpcCacheControl(channel, 20.0)
        model = control.get_pool(cache_pb2.GetPoolRequest(pool_id="default")).pool.model
        opened = control.open_session(
            cache_pb2.OpenSessionRequest(
                pool_id="default", model=model, mode=types_pb2.SESSION_MODE_REMOTE, ttl_ms=10_000, max_sequences=4
            )
        )
        stream = control.step(
            cache_pb2.StreamOpen(
                session_id=opened.session_id, lease_epoch=opened.lease_epoch, stream_epoch=opened.stream_epoch
            )
        )
        stream.receive()
        # Commits a sequence that does not exist.
        commit = step_pb2.Commit(sequence_ids=pack_u64([1 << 32]), num_tokens=pack_u32([1]))
        stream.send(cache_pb2.StepRequest(step=step_pb2.Step(step_id=1, commit=commit)))
        answer = stream.receive()
        stream.close()
        control.close_session(
            cache_pb2.CloseSessionRequest(session_id=opened.session_id, lease_epoch=opened.lease_epoch, drained=True)
        )
        if not answer.HasField("rejected"):
            raise FailedError(f"a step for a sequence that does not exist was not refused: {answer}")


def _prefill(session: Session, compute: Compute, tokens: np.ndarray) -> int:
    """A running sequence whose prompt is computed, committed and published."""
    draft = session.draft()
    sequence = draft.admit(tokens)
    admission = session.run(draft).admitted[0]
    new = len(tokens) - admission.cached_tokens
    generator = torch.Generator().manual_seed(0)
    shape = (new, compute.num_kv_heads, compute.head_dim)
    with compute.plan([sequence], [new], [len(tokens)], num_query_heads=compute.num_kv_heads) as plan:
        for layer in range(compute.num_layers):
            query, key, value = (torch.randn(shape, generator=generator).to(compute.dtype) for _ in range(3))
            plan.run(layer, query, key, value)
    draft = session.draft()
    draft.commit([sequence], [len(tokens)])
    session.run(draft)
    session.flush()
    return sequence


def _attend(compute: Compute, sequence: int) -> torch.Tensor:
    """What a fixed query sees of the sequence's stored keys and values, layer 0: depends on every byte of them."""
    query = torch.ones(1, compute.num_kv_heads, compute.head_dim, dtype=compute.dtype)
    with compute.plan([sequence], [1], [len(PROMPT)], num_query_heads=compute.num_kv_heads) as plan:
        out, _ = plan.attend(0, query)
    return out.clone()
