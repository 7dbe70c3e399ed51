"""Any message gets a canonical code, never UNKNOWN or INTERNAL, and an error changes nothing."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract import messages
from kvplane.v1 import cache_pb2, registry_pb2, step_pb2, types_pb2
from kvplane.v1.cache_pb2_grpc import CacheServiceStub
from kvplane.v1.registry_pb2_grpc import PoolRegistryServiceStub
from kvplane.wire.errors import Code, KvplaneError
from kvplane.wire.status import from_rpc_error, from_status
from tensorless_shard import full_attention, model_message
from wire_engine import A, Rejected, WireEngine, admit, commit, finish, new_sequence, u32

CALLS: dict[str, Any] = {
    "open_session": cache_pb2.OpenSessionRequest,
    "heartbeat": cache_pb2.HeartbeatRequest,
    "close_session": cache_pb2.CloseSessionRequest,
    "register_namespace": cache_pb2.RegisterNamespaceRequest,
    "lookup": cache_pb2.LookupRequest,
    "get_pool": cache_pb2.GetPoolRequest,
    "list_pools": cache_pb2.ListPoolsRequest,
}
FUZZ = settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
BAD: set[Code | None] = {Code.UNKNOWN, Code.INTERNAL}


def code_of(call: Callable[[], Any]) -> Code | None:
    """The code that a call fails with; None when it succeeds."""
    try:
        call()
    except KvplaneError as error:
        return error.code
    except grpc.RpcError as failed:
        return from_rpc_error(failed).code
    return None


@pytest.mark.parametrize("name", sorted(CALLS))
def test_any_request_gets_a_canonical_answer(service: Callable[..., Any], name: str) -> None:
    """Unary calls, half of them aimed at a live session."""
    running, _ = service()
    control = running.control()
    engine = WireEngine(control)
    engine.step(admit=admit(new_sequence(A, range(40))))

    @FUZZ
    @given(messages.messages(CALLS[name].DESCRIPTOR), st.booleans())
    def fuzz(request: Message, aimed: bool) -> None:
        if aimed and name != "close_session" and hasattr(request, "session_id"):
            request.session_id, request.lease_epoch = engine.session_id, 1  # type: ignore[attr-defined]
        assert code_of(lambda: getattr(control, name)(request)) not in BAD

    fuzz()
    running.check_integrity()
    engine.step(commit=commit((A, 40)))


def mutated(valid: Message) -> st.SearchStrategy[Message]:
    """A valid message with one or two of its fields replaced: past the first checks, into the later ones."""

    def merge(other: Message) -> Message:
        result = type(valid)()
        result.CopyFrom(valid)
        for field, value in other.ListFields()[:2]:
            result.ClearField(field.name)
            if field.is_repeated:
                getattr(result, field.name).extend(value)
            elif field.message_type is not None:
                getattr(result, field.name).CopyFrom(value)
            else:
                setattr(result, field.name, value)
        return result

    return messages.messages(valid.DESCRIPTOR).map(merge)


def test_almost_valid_requests_get_a_canonical_answer(service: Callable[..., Any]) -> None:
    """One wrong field in an otherwise right call."""
    running, _ = service()
    control = running.control()
    engine = WireEngine(control)
    engine.step(admit=admit(new_sequence(A, range(40))))
    opening = cache_pb2.OpenSessionRequest(pool_id="default", model=model_message(), mode=types_pb2.SESSION_MODE_REMOTE)
    prompt = types_pb2.Prompt(tokens=u32(range(40)))
    lookup = cache_pb2.LookupRequest(session_id=engine.session_id, lease_epoch=1, prompt=prompt)
    with grpc.insecure_channel(running.address) as channel:
        stub = PoolRegistryServiceStub(channel)

        @settings(FUZZ, max_examples=150)
        @given(mutated(opening), mutated(prompt), mutated(registration()))
        def fuzz(opened: Message, looked_up: Message, registered: Message) -> None:
            assert code_of(lambda: control.open_session(opened)) not in BAD
            lookup.prompt.CopyFrom(looked_up)  # type: ignore[arg-type]
            assert code_of(lambda: control.lookup(lookup)) not in BAD
            assert code_of(lambda: stub.Register(registered, timeout=5)) not in BAD  # type: ignore[arg-type]

        fuzz()
    running.check_integrity()


def registration() -> registry_pb2.RegisterRequest:
    """A registration that is right, but for the rank that is taken."""
    return registry_pb2.RegisterRequest(
        pool_id="another",
        boot_id=7,
        shard=types_pb2.ShardSpec(rank=0, world_size=2),
        model=model_message(),
        groups=[full_attention()],
        directory_version=1,
        max_blocks=64,
        features=["seal", "fence"],
    )


def test_almost_valid_sequences_are_admitted_or_rejected(service: Callable[..., Any]) -> None:
    """One wrong field in an otherwise right prompt; the row is free again whatever came."""
    running, _ = service()
    engine = WireEngine(running.control(), max_sequences=64)
    serial = 0

    @settings(FUZZ, max_examples=150)
    @given(mutated(new_sequence(A, range(40), priority=1)))
    def fuzz(sequence: step_pb2.NewSequence) -> None:
        nonlocal serial
        serial += 1
        sequence.sequence_id = serial << 32 | 3
        try:
            engine.step(admit=admit(sequence))
            engine.step(finish=finish(sequence.sequence_id))
        except Rejected as refused:
            assert refused.error.code not in BAD, refused.error  # noqa: PT017 - an answer, not a failure

    fuzz()
    running.check_integrity()


def test_any_step_gets_a_canonical_answer_and_errors_change_nothing(service: Callable[..., Any]) -> None:
    """Steps with valid ids and any content: applied, or rejected with a reason and no trace."""
    running, _ = service()
    control = running.control()
    engine = WireEngine(control, max_sequences=8)
    engine.step(admit=admit(new_sequence(A, range(40))))

    @settings(FUZZ, max_examples=400)
    @given(messages.messages(step_pb2.Step.DESCRIPTOR))
    def fuzz(step: step_pb2.Step) -> None:
        step.step_id, step.last_seen_step, step.last_seen_notice = engine.step_id + 1, engine.seen, 0
        before = engine.result.stats
        engine.send(step)
        response = engine.stream.receive()
        engine.step_id += 1
        engine.seen = engine.step_id
        if response.HasField("rejected"):
            error = from_status(response.rejected.status)
            assert error.code not in BAD, error
            engine.step()
            assert engine.result.stats == before, error
        else:
            engine.result = response.result

    fuzz()
    running.check_integrity()


@pytest.mark.parametrize("kind", [cache_pb2.StepRequest, registry_pb2.ControlRequest])
def test_any_stream_message_gets_a_canonical_end(service: Callable[..., Any], kind: type[Message]) -> None:
    """Garbage as the first message, or behind a good one, ends the stream with a reason."""
    running, _ = service()
    with grpc.insecure_channel(running.address) as channel:
        call: Any = (
            CacheServiceStub(channel).Step
            if kind is cache_pb2.StepRequest
            else PoolRegistryServiceStub(channel).Control
        )

        @settings(FUZZ, max_examples=40)
        @given(st.lists(messages.messages(kind.DESCRIPTOR), max_size=3))
        def fuzz(requests: list[Message]) -> None:
            assert code_of(lambda: list(call(iter(requests), timeout=5))) not in BAD

        fuzz()
    running.check_integrity()


def test_any_registration_gets_a_canonical_answer(service: Callable[..., Any]) -> None:
    """A shard that is anything but right is refused, and a running pool is not disturbed."""
    running, _ = service()
    engine = WireEngine(running.control())
    with grpc.insecure_channel(running.address) as channel:
        stub = PoolRegistryServiceStub(channel)

        @FUZZ
        @given(messages.messages(registry_pb2.RegisterRequest.DESCRIPTOR))
        def fuzz(request: registry_pb2.RegisterRequest) -> None:
            assert code_of(lambda: stub.Register(request, timeout=5)) not in BAD

        fuzz()
    engine.step(admit=admit(new_sequence(A, range(40))))
