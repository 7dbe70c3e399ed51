"""A plan that stays open does not keep its blocks for ever: it ends with its sequences, its lease or its session."""

import pytest

from compute_control import Blocks
from compute_engine import ATTEND, RemoteEngine
from compute_harness import ORACLE, Setup, step
from kvplane.v1 import step_pb2
from kvplane.wire.errors import NotGrantedError, UnavailableError
from kvplane.wire.packed import pack_u64


def release(body: step_pb2.GrantBody) -> None:
    body.released_sequence_ids = pack_u64([0])


def reset(body: step_pb2.GrantBody) -> None:
    body.reset = True


def abandoned(setup: Setup) -> tuple[RemoteEngine, Blocks, int]:
    """An engine that has left a plan open, the plan's blocks, and the plan."""
    engine, blocks = setup.engine(), setup.blocks(1)
    step(engine, 0, [1, 2, 3, 4], 0, setup.control.grant(engine.session, {0: (0, blocks)}))
    return engine, blocks, engine.plan({0: (1, 4)})


def write_over(setup: Setup, blocks: Blocks) -> None:
    """Another session gets the blocks and writes."""
    other, again = setup.engine(), setup.control.new_blocks([block for block, _ in blocks])
    step(other, 0, [7, 7], 0, setup.control.grant(other.session, {0: (0, again)}))


@pytest.mark.parametrize("change", [release, reset])
def test_a_released_sequence_ends_its_plans(setup: Setup, change: object) -> None:
    """What is sent for such a plan later is refused; closing it is in order."""
    engine, blocks, plan = abandoned(setup)
    engine.apply(setup.control.grant(engine.session, change=change))  # type: ignore[arg-type]
    with pytest.raises(NotGrantedError, match=f"plan {plan}"):
        engine.run(plan, 0, ATTEND, query=ORACLE.rows([1, 2, 3, 4], 3, 4, 0)[0])
    write_over(setup, blocks)
    engine.close_plan(plan)
    # Nothing was given back twice: a plan of the new owner still keeps its blocks.
    engine, blocks, _ = abandoned(setup)
    with pytest.raises(UnavailableError, match="open plan"):
        write_over(setup, blocks)


def test_other_sequences_keep_their_plans(setup: Setup) -> None:
    engine, _, _ = abandoned(setup)
    step(engine, 1, [1, 2], 0, setup.control.grant(engine.session, {1: (0, setup.blocks(1))}))
    plan = engine.plan({1: (1, 2)})
    engine.apply(setup.control.grant(engine.session, change=release))
    engine.run(plan, 0, ATTEND, query=ORACLE.rows([1, 2], 1, 2, 0)[0])


def test_a_newer_lease_ends_plans(setup: Setup) -> None:
    """Their engine may be gone for good without its connection having ended."""
    engine, blocks, _ = abandoned(setup)
    setup.control.open_session(resume=engine.session)
    write_over(setup, blocks)
