"""Engines that are silent while their lease ends or the services are restarted, with real shards.

Blocks of attached processes that live on after their lease, and that nobody can ask, come back all the same; those of
one that stays stopped have to wait (`test_with_compute.py`).
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest
import torch

from compute_access import BLOCK
from compute_engine import running, settings
from compute_oracle import Oracle
from kvplane.client import LaunchPausedError, Session
from kvplane.client.compute import open_compute
from service_rig import RunningService, wait_until

TTL_SECONDS = 2.0
ORACLE = Oracle(4, 2, 8, 16, torch.float32)
MODEL = {
    "num_layers": ORACLE.num_layers,
    "num_kv_heads": ORACLE.num_kv_heads,
    "head_dim": ORACLE.head_dim,
    "kv_dtype": "float32",
    "block_tokens": BLOCK,
    "tokenizer_revision": "t",
    "tensor_parallel": 2,
}
SERVICE = {"watermark": 0.0, "drain_seconds": 0.0, "metrics_address": ""}


def silence(session: Session) -> None:
    """The engine lives, and sends nothing more: its lease runs out."""
    session._heartbeat.stop()  # noqa: SLF001 - what a cut between engine and cache service comes to
    session._link.close()  # noqa: SLF001 - the same for its stream


def quarantined(service: RunningService) -> int:
    """Blocks that somebody may still touch."""
    pools = service.server.plane.pools
    return service.on_loop(lambda: pools["default"].stats().quarantined_blocks)


@pytest.mark.parametrize("closed", ["before", "after"])
def test_a_compute_access_closed_around_the_end_of_the_lease(tmp_path: Path, closed: str) -> None:
    """The engine cannot reach the cache service. It closes its compute access before its lease ends, when saying that
    it has drained counts for nothing yet, or after it."""
    with ExitStack() as stack:
        service = RunningService(tmp_path, **SERVICE)
        stack.callback(service.stop)
        for rank in range(2):
            stack.enter_context(running(settings(tmp_path, f"compute-{rank}", rank=rank, **MODEL)))
        service.wait_ready()
        session = Session.open(address=service.address, ttl_seconds=TTL_SECONDS)
        compute = open_compute(session)
        draft = session.draft()
        sequence = draft.admit(range(10))
        session.run(draft)
        compute.plan([sequence], [10], [10], num_query_heads=4).close()
        silence(session)
        if closed == "before":
            compute.close()
        wait_until(lambda: service.on_loop(lambda: session.session_id not in _live(service)), "the lease is over")
        if closed == "after":
            compute.close()
        wait_until(lambda: quarantined(service) == 0, "every block is back", 1.0)
        service.check_integrity()


def test_a_process_that_the_shards_cannot_reach_any_more(tmp_path: Path) -> None:
    """Shards and cache service were started again, and its lease is over: its hold maps keep its blocks. When it closes
    its compute access they are empty, and the shards see that by themselves."""
    with ExitStack() as stack:
        shards = stack.enter_context(ExitStack())
        service = RunningService(tmp_path, **SERVICE)
        values = [settings(tmp_path, f"compute-{rank}", rank=rank, **MODEL) for rank in range(2)]
        for each in values:
            shards.enter_context(running(each))
        service.wait_ready()
        session = Session.open(address=service.address, ttl_seconds=TTL_SECONDS)
        compute = open_compute(session)
        stack.callback(compute.close)
        draft = session.draft()
        sequence = draft.admit(range(10))
        session.run(draft)
        plan = compute.plan([sequence], [10], [10], num_query_heads=4)
        silence(session)
        shards.close()
        service.stop()
        for each in values:
            stack.enter_context(running(each))
        service = RunningService(tmp_path, **SERVICE)
        stack.callback(service.stop)
        service.wait_ready()
        time.sleep(TTL_SECONDS + 1.5)
        assert quarantined(service) == 3, "its plan is open"
        plan.close()
        time.sleep(1.5)
        assert quarantined(service) == 3, "its tables name them, for all that the shards know"
        compute.close()
        wait_until(lambda: quarantined(service) == 0, "every block is back", 3.0)
        service.check_integrity()


@pytest.mark.parametrize("mode", ["attached", "remote"])
def test_no_plan_between_a_declaration_and_its_result(tmp_path: Path, mode: Literal["attached", "remote"]) -> None:
    """The heartbeat has declared a silent engine's sequence to a restarted service: what is left of its table, the
    engine does not know yet."""
    with ExitStack() as stack:
        service = RunningService(tmp_path, **SERVICE)
        for rank in range(2):
            stack.enter_context(running(settings(tmp_path, f"compute-{rank}", rank=rank, **MODEL)))
        service.wait_ready()
        session = stack.enter_context(Session.open(mode=mode, address=service.address, ttl_seconds=TTL_SECONDS))
        compute = open_compute(session)
        draft = session.draft()
        sequence = draft.admit(range(10))
        session.run(draft)
        tokens = [*range(10), 7]
        with compute.plan([sequence], [10], [10], num_query_heads=ORACLE.num_query_heads) as plan:
            for layer in range(ORACLE.num_layers):
                plan.run(layer, *ORACLE.rows(tokens, 0, 10, layer))
        service.stop()
        service = RunningService(tmp_path, **SERVICE)
        stack.callback(service.stop)
        wait_until(lambda: session.state.awaits_declared and not session.state.owes_declaration, "it has declared")
        service.wait_ready()
        for _ in range(2):
            with pytest.raises(LaunchPausedError):
                compute.plan([sequence], [1], [10], num_query_heads=ORACLE.num_query_heads)
        draft = session.draft()
        draft.advance(sequence, 7, 10, 11)
        session.run(draft)
        compute.close()
        compute = stack.enter_context(open_compute(session))
        with compute.plan([sequence], [1], [11], num_query_heads=ORACLE.num_query_heads) as plan:
            out = plan.run(0, *ORACLE.rows(tokens, 10, 11, 0))
        torch.testing.assert_close(out.double(), ORACLE.attention(tokens, 10, 11, 0), rtol=2e-5, atol=2e-5)


def _live(service: RunningService) -> set[int]:
    sessions = service.server.plane.pools["default"].sessions
    return {session_id for session_id, each in sessions.items() if not each.core.ended}
