"""What the service and its in-process twin refuse, in the same words."""

from collections.abc import Callable
from typing import Any

import pytest

from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire import errors
from wire_engine import (
    BLOCK,
    A,
    B,
    C,
    Rejected,
    WireEngine,
    admit,
    advance,
    commit,
    new_sequence,
    u32,
    u64,
)

MakeRig = Callable[..., Any]


FORK_OF_B = step_pb2.Fork(parent_sequence_id=B, child_sequence_ids=u64([C]))


def test_a_bad_step_is_refused_whole_and_those_behind_it_too(rig: MakeRig) -> None:
    """I6: the field is named, the id is spent, nothing changed, PRIOR_STEP_REJECTED behind it, then on as before."""
    made = rig()
    engine = WireEngine(made.control)
    engine.step(admit=admit(new_sequence(A, range(40))))
    before = engine.result.stats
    bad, behind = engine.request(commit=commit((A, 41))), engine.request(commit=commit((A, 40)))
    engine.send(bad)
    engine.send(behind)
    with pytest.raises(Rejected) as refused:
        engine.receive()
    assert refused.value.error.violations[0].field == "step.commit.num_tokens[0]"
    with pytest.raises(Rejected) as skipped:
        engine.receive()
    assert type(skipped.value.error) is errors.PriorStepRejectedError
    engine.step()
    assert engine.result.stats == before


@pytest.mark.parametrize(
    ("operations", "field"),
    [
        ({"commit": step_pb2.Commit(sequence_ids=bytes(7))}, "step.commit.sequence_ids"),
        ({"commit": step_pb2.Commit(sequence_ids=u64([A]))}, "step.commit.num_tokens"),
        ({"advance": step_pb2.Advance(sequence_ids=u64([A]), tokens=u32([1, 2]))}, "step.advance.tokens"),
        ({"advance": advance(1, (A, 0, 1), (A, 0, 1))}, "step.advance.sequence_ids[1]"),
        ({"extend": step_pb2.Extend(sequence_ids=u64([9]), num_slots=u32([1]))}, "step.extend.sequence_ids[0]"),
        ({"finish": step_pb2.Finish(sequence_ids=u64([A]), reasons=u32([77]))}, "step.finish.reasons[0]"),
        ({"admit": step_pb2.Admit(order=u64([B]))}, "step.admit.order[0].sequence_id"),
        ({"admit": step_pb2.Admit(sequences=[new_sequence(B, [1])])}, "step.admit.order"),
        ({"admit": admit(new_sequence(B, []))}, "step.admit.sequences[0].tokens"),
        ({"admit": admit(new_sequence(B, range(64 * BLOCK)))}, "step.admit.order[0].tokens"),
        ({"admit": admit(new_sequence(A, [1]))}, "step.admit.order[0].sequence_id"),
        ({"forks": [FORK_OF_B]}, "step.forks[0].parent_sequence_id"),
        ({"acks": [types_pb2.Ack(op_id=5)]}, "step.acks[0].op_id"),
        ({"acknowledged_revocations": u64([3])}, "step.acknowledged_revocations[0]"),
        ({"completed": 9}, "step.completed_step"),
        ({"admit": admit(new_sequence(B, [1], arrival_rank=1 << 63))}, "step.admit.sequences[0].arrival_rank"),
        (
            {
                "admit": admit(
                    new_sequence(B, range(20), content=[types_pb2.ContentSpan(kind=0x22, content=b"x", num_tokens=1)])
                )
            },
            "step.admit.sequences[0].content[0].kind",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_bad_field_is_named(rig: MakeRig, operations: dict[str, Any], field: str) -> None:
    """INVALID_ARGUMENT with the path of the field in the request; nothing changes."""
    made = rig()
    engine = WireEngine(made.control)
    engine.step(admit=admit(new_sequence(A, range(40))))
    before = engine.result.stats
    with pytest.raises(Rejected) as refused:
        engine.step(**operations)
    assert [each.field for each in refused.value.error.violations] == [field]
    engine.step()
    assert engine.result.stats == before
    made.check_integrity()


@pytest.mark.parametrize(
    ("operations", "feature"),
    [
        ({"rollback": step_pb2.Rollback(slot_moves=[step_pb2.SlotMove(sequence_id=A)])}, "slot_moves"),
        ({"admit": admit(new_sequence(B, [1], purpose=step_pb2.PURPOSE_LOAD))}, "purpose"),
        ({"admit": admit(new_sequence(B, [1], adopt=step_pb2.Adoption(op_id=1)))}, "adopt"),
        ({"finish": step_pb2.Finish(retain=[step_pb2.Retain(sequence_id=A)])}, "retain"),
    ],
)
def test_what_is_not_built_is_refused_and_never_ignored(rig: MakeRig, operations: dict[str, Any], feature: str) -> None:
    """UNSUPPORTED_FEATURE names it."""
    made = rig()
    engine = WireEngine(made.control)
    engine.step(admit=admit(new_sequence(A, range(40))))
    with pytest.raises(Rejected) as refused:
        engine.step(**operations)
    assert refused.value.error.reason == "UNSUPPORTED_FEATURE"
    assert refused.value.error.metadata["feature"] == feature


@pytest.mark.parametrize("length", [40, 9000])
def test_an_unknown_namespace_rejects_the_step_at_any_length(rig: MakeRig, length: int) -> None:
    """Whether the prompt is hashed ahead or not: rejected, the stream goes on, the id is spent."""
    made = rig(num_blocks=2048)
    engine = WireEngine(made.control)
    with pytest.raises(Rejected) as refused:
        engine.step(admit=admit(new_sequence(A, range(length), namespace_id=99)))
    assert type(refused.value.error) is errors.NotFoundError
    engine.step(admit=admit(new_sequence(A, range(length))))


def test_an_unknown_feature_rejects_the_step(rig: MakeRig) -> None:
    """Section 10: refused, never ignored, and the stream goes on."""
    made = rig()
    engine = WireEngine(made.control)
    engine.stream.send(cache_pb2.StepRequest(required_features=["f" * 1000], step=engine.request()))
    with pytest.raises(Rejected) as refused:
        engine.receive()
    assert refused.value.error.metadata["feature"] == "f" * 64
    engine.step()


def test_namespaces_are_limited_and_an_error_adds_none(rig: MakeRig) -> None:
    """The limit holds however often it is asked."""
    made = rig(max_namespaces=3)
    engine = WireEngine(made.control)

    def register(name: str) -> int:
        space = cache_pb2.NamespaceSpec(adapter_id=name)
        request = cache_pb2.RegisterNamespaceRequest(session_id=engine.session_id, lease_epoch=1, namespace=space)
        return int(made.control.register_namespace(request).namespace_id)

    known = [register("a"), register("b")]
    for name in ("c", "c", "d"):
        with pytest.raises(errors.LimitExceededError):
            register(name)
    assert [register("a"), register("b")] == known
