"""Errors survive the wire in both directions, rich or bare."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from kvplane.v1.cache_pb2 import GetPoolRequest, GetPoolResponse, ListPoolsRequest
from kvplane.v1.cache_pb2_grpc import CacheServiceStub
from kvplane.wire import errors, options, status
from kvplane.wire.errors import Code, FieldViolation, KvplaneError


def tree(root: type[KvplaneError]) -> Iterator[type[KvplaneError]]:
    """A class and all below it."""
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


KINDS = sorted(set(tree(KvplaneError)), key=lambda kind: kind.__name__)
TEXT = st.text(max_size=20)


@given(
    st.sampled_from(KINDS),
    TEXT,
    st.dictionaries(TEXT, TEXT, max_size=3),
    st.none() | st.integers(0, 10**6).map(lambda ms: ms / 1000),
    st.lists(st.builds(FieldViolation, TEXT, TEXT), max_size=3).map(tuple),
)
def test_every_error_survives(
    kind: type[KvplaneError],
    message: str,
    metadata: dict[str, str],
    retry_after: float | None,
    violations: tuple[FieldViolation, ...],
) -> None:
    """Class, reason, message and details come back as they were sent."""
    sent = kind(message, metadata=metadata, retry_after_seconds=retry_after, violations=violations)
    got = status.from_status(Status.FromString(status.to_status(sent).SerializeToString()))
    assert type(got) is kind
    assert (got.message, got.reason, got.metadata) == (message, sent.reason, metadata)
    assert got.retry_after_seconds == pytest.approx(retry_after)
    assert got.violations == violations


def test_reasons_are_unique_and_codes_canonical() -> None:
    """A reason names one class, and every class has a code that grpc knows."""
    assert len({kind.default_reason for kind in KINDS}) == len(KINDS)
    assert {code.value: code.name for code in Code} == {
        code.value[0]: code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK
    }


@pytest.mark.parametrize("code", list(Code))
def test_a_bare_status_of_any_server_is_understood(code: Code) -> None:
    """Without details the code alone decides, and an unknown one is no crash."""
    error = status.from_status(Status(code=int(code), message="m"))
    assert error.code == code or error.metadata["code"] == code.name
    assert status.from_status(Status(code=4711)).code == Code.UNKNOWN


def test_a_foreign_reason_keeps_the_code() -> None:
    """Another domain's SESSION_EXPIRED is not ours."""
    foreign = status.to_status(errors.SessionExpiredError("gone"))
    info = ErrorInfo()
    assert foreign.details[0].Unpack(info)
    info.domain = "elsewhere"
    foreign.details[0].Pack(info)
    assert type(status.from_status(foreign)) is errors.NotFoundError


def test_a_malformed_detail_is_left_out() -> None:
    """A server that sends garbage as a detail still gets its code across."""
    broken = status.to_status(errors.LimitExceededError("full"))
    broken.details[0].value = b"\xff\xff"
    assert type(status.from_status(broken)) is errors.LimitExceededError


def test_ok_is_no_error() -> None:
    """Asking for the error of a success is a bug of the caller."""
    with pytest.raises(ValueError, match="OK"):
        status.from_status(Status())


def refusing(error: KvplaneError) -> grpc.GenericRpcHandler:
    """A CacheService whose GetPool aborts with an error; nothing else is built."""

    async def get_pool(
        request: GetPoolRequest, context: grpc.aio.ServicerContext[GetPoolRequest, GetPoolResponse]
    ) -> GetPoolResponse:
        await context.abort_with_status(status.abort_status(error))
        raise AssertionError(request)

    handler = grpc.unary_unary_rpc_method_handler(
        get_pool, GetPoolRequest.FromString, GetPoolResponse.SerializeToString
    )  # fmt: skip
    return grpc.method_handlers_generic_handler("kvplane.v1.CacheService", {"GetPool": handler})


async def refusals(error: KvplaneError) -> list[KvplaneError]:
    """What clients see of a server that refuses."""
    server = grpc.aio.server(options=options.server_options())
    server.add_generic_rpc_handlers([refusing(error)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        return await seen_by_clients(port)
    finally:
        await server.stop(None)


async def seen_by_clients(port: int) -> list[KvplaneError]:
    """What an aio client sees, one that calls what is not built, and a sync one."""
    seen = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options.channel_options()) as channel:
        stub = CacheServiceStub(channel)
        for call in (stub.GetPool(GetPoolRequest(), timeout=10), stub.ListPools(ListPoolsRequest(), timeout=10)):
            try:
                await call
            except grpc.aio.AioRpcError as failed:
                seen.append(status.from_rpc_error(failed))

    def sync() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=options.channel_options()) as channel:
            try:
                CacheServiceStub(channel).GetPool(GetPoolRequest(), timeout=10)
            except grpc.RpcError as failed:
                seen.append(status.from_rpc_error(failed))

    await asyncio.to_thread(sync)
    return seen


def test_errors_cross_a_real_socket() -> None:
    """Aio and sync clients see the class, the field and the retry time; what is not built is UNIMPLEMENTED."""
    sent = errors.InvalidArgumentError(
        "commit.num_tokens: 9 is beyond 8",
        violations=(FieldViolation("commit.num_tokens", "9 is beyond 8"),),
        metadata={"limit": "8"},
        retry_after_seconds=0.25,
    )
    aio, unbuilt, sync = asyncio.run(refusals(sent))
    for got in (aio, sync):
        assert type(got) is errors.InvalidArgumentError
        assert (got.violations, got.metadata, got.retry_after_seconds) == (sent.violations, sent.metadata, 0.25)
    assert unbuilt.code == Code.UNIMPLEMENTED


def test_the_page_of_errors_is_complete() -> None:
    """docs/errors.md has a row for every class, with its code and reason."""
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    for kind in KINDS:
        if kind is not KvplaneError:
            assert f"| `{kind.__name__}` | {kind.code.name} | {kind.default_reason} |" in page
