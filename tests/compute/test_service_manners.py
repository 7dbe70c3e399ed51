"""What every service of kvplane does: health, reflection, metrics, limits; and what fuzz does to it: nothing."""

import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from compute_control import ControlPlane
from compute_engine import WRITE_AND_ATTEND, RemoteEngine, running, settings
from compute_harness import ORACLE, Setup, step
from compute_oracle import assert_attention
from contract.messages import messages
from kvplane.compute.config import ComputeConfig
from kvplane.compute.executor import Executor
from kvplane.compute.server import COMPUTE_SERVICE
from kvplane.compute.sessions import Session
from kvplane.v1 import compute_pb2, step_pb2
from kvplane.wire.errors import Code, LimitExceededError, UnavailableError
from kvplane.wire.grants import sign
from kvplane.wire.status import from_rpc_error

FUZZ = hypothesis_settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    derandomize=True,
    database=None,
)


def health_of(channel: grpc.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)


def test_health_follows_the_pool(tmp_path: Path) -> None:
    """The process serves at once, ComputeService with its pool."""
    control = ControlPlane().start(f"unix:{tmp_path / 'cache.sock'}")
    with running(settings(tmp_path)) as server, grpc.insecure_channel(server.addresses[0]) as channel:
        control.wait()
        assert health_of(channel, "") == health_pb2.HealthCheckResponse.SERVING
        assert health_of(channel, COMPUTE_SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        control.create_pool(16)
        assert health_of(channel, COMPUTE_SERVICE) == health_pb2.HealthCheckResponse.SERVING
    control.stop()


def test_reflection_lists_the_service(setup: Setup) -> None:
    engine = setup.engine()
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(engine.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=5)
    assert COMPUTE_SERVICE in [service.name for service in answer.list_services_response.service]


def test_metrics(tmp_path: Path) -> None:
    control = ControlPlane().start(f"unix:{tmp_path / 'cache.sock'}")
    with running(settings(tmp_path, metrics_address="127.0.0.1:0")) as server:
        control.wait()
        control.create_pool(16)
        engine = RemoteEngine(server.addresses[0], control.open_session())
        step(engine, 0, [1, 2, 3], 0, control.grant(engine.session, {0: (0, control.new_blocks([1]))}))
        with pytest.raises(Exception, match="no granted table"):
            engine.plan({5: (1, 1)})
        assert server.metrics_port
        text = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics").read().decode()
        engine.close()
    control.stop()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines["kvplane_compute_attended_tokens_total"] == "6.0"
    assert lines["kvplane_compute_written_bytes_total"] == str(float(3 * 2 * 2 * 2 * 16 * 4))
    assert lines['kvplane_compute_refusals_total{reason="NOT_GRANTED"}'] == "1.0"
    assert lines["kvplane_compute_control_plane_connected"] == "1.0"
    assert float(lines["kvplane_compute_pool_bytes"]) > 0


def test_a_second_service_does_not_take_the_socket(setup: Setup, tmp_path: Path) -> None:
    values = settings(tmp_path) | {"listen": [setup.address]}
    with pytest.raises(RuntimeError, match="listens"), running(values):
        pass


def test_a_second_service_does_not_take_the_memory(setup: Setup, tmp_path: Path) -> None:
    """Two processes on one directory would each undo what the other wrote."""
    values = settings(tmp_path) | {"memory_folder": setup.server.config.memory_folder}
    with pytest.raises(RuntimeError, match="another process"), running(values):
        pass


def test_a_plan_that_is_open_ends_while_the_service_drains(setup: Setup) -> None:
    engine = setup.engine()
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(1))}))
    plan = engine.plan({0: (1, 1)})
    setup.server.state.draining = True
    query, key, value = ORACLE.rows([1], 0, 1, 0)
    engine.run(plan, 0, WRITE_AND_ATTEND, query=query, key=key, value=value)
    engine.close_plan(plan)
    with pytest.raises(UnavailableError):
        engine.plan({0: (1, 1)})
    setup.server.state.draining = False


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"listen": ["127.0.0.1:0"]}, "listen"),
        ({"tls_certificate": "x.pem"}, "tls_certificate"),
        ({"rank": 1}, "rank"),
        ({"tensor_parallel": 3}, "tensor_parallel"),
        ({"pipeline_parallel": 3}, "pipeline_parallel"),
        ({"block_tokens": 24}, "block_tokens"),
        ({"head_dim": 20}, "head_dim"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_configuration_errors_name_the_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ComputeConfig(**(settings(tmp_path) | changes))


def test_a_full_queue_is_told_with_a_retry(setup: Setup) -> None:
    """Backpressure: the answer says when to come again, and the stream goes on."""
    executor: Executor = setup.server._executor  # noqa: SLF001
    engine = setup.engine()
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(1))}))
    executor._capacity = 0  # noqa: SLF001
    with pytest.raises(LimitExceededError) as refused:
        engine.plan({0: (1, 1)})
    executor._capacity = 256  # noqa: SLF001
    assert refused.value.retry_after_seconds
    step(engine, 0, [1], 0)


def works(setup: Setup) -> None:
    """A sequence from the beginning, with the right answers."""
    engine = setup.engine()
    grant = setup.control.grant(engine.session, {0: (0, setup.blocks(2))})
    for layer, out in enumerate(step(engine, 0, [1, 2, 3, 4, 5], 0, grant)):
        assert_attention(out, ORACLE.attention([1, 2, 3, 4, 5], 0, 5, layer))
    setup.close_engines()


def test_fuzzed_requests_of_a_real_session(setup: Setup) -> None:
    """Any request on an open stream is answered or refused with a reason of ours; the stream and the service go on."""
    engine = setup.engine()
    engine.apply(setup.control.grant(engine.session, {0: (0, setup.blocks(2)), 1: (0, setup.blocks(1))}))

    @FUZZ
    @given(
        st.lists(messages(compute_pb2.Plan.DESCRIPTOR), max_size=2),
        st.lists(messages(compute_pb2.Run.DESCRIPTOR), max_size=2),
        st.lists(messages(compute_pb2.ApplyGrants.DESCRIPTOR), max_size=1),
    )
    def fuzz(plans: list[Message], runs: list[Message], grants: list[Message]) -> None:
        sent = [("plan", each) for each in plans] + [("run", each) for each in runs]
        for name, message in [*sent, *(("apply_grants", each) for each in grants)]:
            engine.send(**{name: message})
            response = engine.receive(check=False)
            assert response.refused.code not in (2, 13), response

    fuzz()
    works(setup)


def test_signed_nonsense_is_refused_whole(setup: Setup) -> None:
    """Even a grant that the control plane signed is checked: it changes tables as a whole or not at all."""
    engine = setup.engine()
    model = setup.control.grant(engine.session)
    engine.apply(model)
    head = step_pb2.GrantBody.FromString(model.body)

    @FUZZ
    @given(messages(step_pb2.GrantBody.DESCRIPTOR))
    def fuzz(message: Message) -> None:
        assert isinstance(message, step_pb2.GrantBody)
        body = step_pb2.GrantBody()
        body.CopyFrom(message)
        for name in ("pool_id", "pool_epoch", "incarnation", "boot_ids", "session_id", "lease_epoch"):
            setattr(body, name, getattr(head, name))
        del body.required_features[:]
        body.number = engine.ask(apply_grants=compute_pb2.ApplyGrants()).grants_applied.last_grant + 1
        before = dict(session_of(setup, engine).tables)
        engine.send(apply_grants=compute_pb2.ApplyGrants(grants=[sign(setup.control.key, body)]))
        response = engine.receive(check=False)
        assert response.refused.code not in (2, 13), response
        assert response.HasField("grants_applied") or session_of(setup, engine).tables == before

    fuzz()
    works(setup)


def session_of(setup: Setup, engine: RemoteEngine) -> Session:
    holding = setup.server.state.holding
    assert holding is not None
    session = holding.sessions.get(engine.session.session_id)
    assert session is not None
    return session


@pytest.mark.parametrize("name", ["Attach", "ReadBlocks", "WriteBlocks", "Execute"])
def test_fuzzed_calls(setup: Setup, name: str) -> None:
    """Every RPC, with whatever a stranger may send."""
    method = compute_pb2.DESCRIPTOR.services_by_name["ComputeService"].methods_by_name[name]
    call = getattr(setup.engine().stub, name)

    @FUZZ
    @given(messages(method.input_type))
    def fuzz(message: Message) -> None:
        given_message = iter([message]) if method.client_streaming else message
        code = None
        try:
            answer = call(given_message, timeout=5)
            if method.server_streaming:
                list(answer)
        except grpc.RpcError as error:
            code = from_rpc_error(error).code
        assert code not in (Code.UNKNOWN, Code.INTERNAL)

    fuzz()
    works(setup)
