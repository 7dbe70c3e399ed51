"""What a client may ask for is bounded, so that no small message costs much time or memory."""

import pytest
import torch

from compute_engine import ATTEND, inline
from compute_harness import Setup
from kvplane.v1 import compute_pb2
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.packed import pack_u32, pack_u64


def test_a_plan_names_a_sequence_once(setup: Setup) -> None:
    """And not more of them than the session may have: a small message must not cost seconds of the device thread."""
    engine = setup.engine(setup.control.open_session(max_sequences=4))
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(1))}))
    for ids, wrong in (([0, 0], "twice"), (list(range(5)), "may have 4")):
        counts = pack_u32([0] * len(ids))
        plan = compute_pb2.Plan(plan_id=1, sequence_ids=pack_u64(ids), query_lengths=counts, kv_lengths=counts)
        with pytest.raises(InvalidArgumentError, match=f"sequence_ids.*{wrong}"):
            engine.ask(plan=plan)
    engine.plan({0: (1, 1)})


def test_few_kernel_plans_are_kept(setup: Setup) -> None:
    """Clients choose options and heads at every run."""
    engine = setup.engine()
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(1))}))
    plan = engine.plan({0: (0, 0)})
    for number in range(20):
        heads = 2 * (1 + number % 4)
        query = inline("query", torch.zeros(0, heads, 16))
        run = compute_pb2.Run(plan_id=plan, kind=ATTEND, tensors=[query])
        engine.ask(run=run)
        run.options.scale = 1.0 + number
        engine.ask(run=run)
    holding = setup.server.state.holding
    assert holding is not None
    session = holding.sessions.get(engine.session.session_id)
    assert session is not None
    assert [len(each.prepared) for each in session.plans.values()] == [8]
