"""The cache service over gRPC, for callers with an event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from kvplane.v1 import cache_pb2
from kvplane.v1.cache_pb2_grpc import CacheServiceStub
from kvplane.wire.addresses import cache_address
from kvplane.wire.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    KvplaneError,
    UnavailableError,
)
from kvplane.wire.interface import DEFAULT_TIMEOUT_SECONDS
from kvplane.wire.options import channel_options
from kvplane.wire.status import from_rpc_error

Response = TypeVar("Response")
_TRANSPORT_FAILED = "Internal error from Core"
"""What grpc.aio says when a connection breaks under a read: no error of the server's."""

StepCall = grpc.aio.StreamStreamCall[cache_pb2.StepRequest, cache_pb2.StepResponse]


class AioStepStream:
    """A session's stream. A task reads it, so that a receive can give up without ending the stream."""

    def __init__(self, call: StepCall) -> None:
        self._call = call
        self._responses: asyncio.Queue[cache_pb2.StepResponse | KvplaneError] = asyncio.Queue()
        self._error: KvplaneError | None = None
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def send(self, request: cache_pb2.StepRequest) -> None:
        """Send a step. Raises the error that ended the stream."""
        if self._error is not None:
            raise self._error
        try:
            await self._call.write(request)
        except grpc.RpcError as failed:
            raise from_rpc_error(failed) from None
        except asyncio.InvalidStateError:
            raise CancelledError("the stream is over") from None

    async def receive(self, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> cache_pb2.StepResponse:
        """The next answer or notice. Raises `DeadlineExceededError`, or the error that ended the stream."""
        if self._responses.empty():
            try:
                response = await asyncio.wait_for(self._responses.get(), timeout)
            except TimeoutError:
                raise DeadlineExceededError(f"no message within {timeout:g} s") from None
        else:
            response = self._responses.get_nowait()
        if isinstance(response, KvplaneError):
            self._responses.put_nowait(response)
            raise response
        return response

    def receive_now(self) -> cache_pb2.StepResponse | None:
        """A message that is there already; None when there is none, or the stream is over."""
        if self._responses.empty() or self._error is not None:
            return None
        response = self._responses.get_nowait()
        return None if isinstance(response, KvplaneError) else response

    async def close(self) -> None:
        """Cut the stream. The session lives on."""
        self._call.cancel()
        await self._reader

    async def _read(self) -> None:
        error: KvplaneError = CancelledError("the server ended the stream")
        try:
            while True:
                response = await self._call.read()
                if not isinstance(response, cache_pb2.StepResponse):
                    break
                self._responses.put_nowait(response)
            code = await self._call.code()
            if code != grpc.StatusCode.OK:
                error = from_rpc_error(
                    grpc.aio.AioRpcError(
                        code,
                        await self._call.initial_metadata(),
                        await self._call.trailing_metadata(),
                        await self._call.details(),
                    )
                )
        except grpc.RpcError as failed:
            error = from_rpc_error(failed)
        except asyncio.CancelledError:
            error = CancelledError("the stream was closed")
        if isinstance(error, InternalError) and error.message == _TRANSPORT_FAILED:
            error = UnavailableError("the connection broke")
        self._error = error
        self._responses.put_nowait(error)


class AioCacheControl:
    """CacheService over an aio channel. Every call has a deadline; errors are `KvplaneError`s."""

    def __init__(self, channel: grpc.aio.Channel, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        self._stub = CacheServiceStub(channel)
        self._timeout = timeout_seconds

    async def open_session(self, request: cache_pb2.OpenSessionRequest) -> cache_pb2.OpenSessionResponse:
        """Take or resume a lease."""
        return await self._call(self._stub.OpenSession, request)

    async def heartbeat(self, request: cache_pb2.HeartbeatRequest) -> cache_pb2.HeartbeatResponse:
        """Renew a lease."""
        return await self._call(self._stub.Heartbeat, request)

    async def close_session(self, request: cache_pb2.CloseSessionRequest) -> cache_pb2.CloseSessionResponse:
        """End a lease."""
        return await self._call(self._stub.CloseSession, request)

    async def register_namespace(
        self, request: cache_pb2.RegisterNamespaceRequest
    ) -> cache_pb2.RegisterNamespaceResponse:
        """Name a namespace."""
        return await self._call(self._stub.RegisterNamespace, request)

    async def lookup(self, request: cache_pb2.LookupRequest) -> cache_pb2.LookupResponse:
        """How much of a prompt is published."""
        return await self._call(self._stub.Lookup, request)

    async def get_pool(self, request: cache_pb2.GetPoolRequest) -> cache_pb2.GetPoolResponse:
        """One pool."""
        return await self._call(self._stub.GetPool, request)

    async def list_pools(self, request: cache_pb2.ListPoolsRequest) -> cache_pb2.ListPoolsResponse:
        """A page of pools."""
        return await self._call(self._stub.ListPools, request)

    async def step(self, opening: cache_pb2.StreamOpen) -> AioStepStream:
        """Open a session's stream; the first answer is `opened`."""
        stream = AioStepStream(self._stub.Step())
        try:
            await stream.send(cache_pb2.StepRequest(open=opening))
        except BaseException:
            await stream.close()
            raise
        return stream

    async def _call(self, call: Callable[..., Awaitable[Response]], request: object) -> Response:
        try:
            return await call(request, timeout=self._timeout)
        except grpc.RpcError as failed:
            raise from_rpc_error(failed) from None


def connect_aio(address: str | None = None, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """An aio channel to the cache service at `address` (default: `kvplane.wire.addresses.cache_address`)."""
    target = address or cache_address()
    if credentials is not None:
        return grpc.aio.secure_channel(target, credentials, options=channel_options())
    return grpc.aio.insecure_channel(target, options=channel_options())
