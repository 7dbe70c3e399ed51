"""The cache service over gRPC, for callers without an event loop."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import grpc

from kvplane.v1 import cache_pb2
from kvplane.v1.cache_pb2_grpc import CacheServiceStub
from kvplane.wire.addresses import cache_address
from kvplane.wire.errors import CancelledError, DeadlineExceededError, KvplaneError
from kvplane.wire.interface import DEFAULT_TIMEOUT_SECONDS
from kvplane.wire.options import channel_options
from kvplane.wire.status import from_rpc_error

Response = TypeVar("Response")
Requests = queue.SimpleQueue[cache_pb2.StepRequest | None]


class ResponseCall(Protocol):
    """What grpc returns for a stream."""

    def __iter__(self) -> Iterator[cache_pb2.StepResponse]:
        """The responses."""
        ...

    def cancel(self) -> bool:
        """End the call."""
        ...


class GrpcStepStream:
    """A session's stream. A thread reads it, so that a receive can have a deadline."""

    def __init__(self, requests: Requests, call: ResponseCall) -> None:
        self._requests = requests
        self._call = call
        self._responses: queue.SimpleQueue[cache_pb2.StepResponse | KvplaneError] = queue.SimpleQueue()
        self._error: KvplaneError | None = None
        self._reader = threading.Thread(target=self._read, name="kvplane-step-reader", daemon=True)
        self._reader.start()

    def send(self, request: cache_pb2.StepRequest) -> None:
        """Send a step. Raises the error that ended the stream."""
        if self._error is not None:
            raise self._error
        self._requests.put(request)

    def receive(self, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> cache_pb2.StepResponse:
        """The next answer or notice. Raises `DeadlineExceededError`, or the error that ended the stream."""
        try:
            response = self._responses.get(timeout=timeout)
        except queue.Empty:
            raise DeadlineExceededError(f"no message within {timeout:g} s") from None
        if isinstance(response, KvplaneError):
            self._responses.put(response)
            raise response
        return response

    def close(self) -> None:
        """Cut the stream. The session lives on."""
        self._requests.put(None)
        self._call.cancel()
        self._reader.join()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._responses.put(response)
            error: KvplaneError = CancelledError("the server ended the stream")
        except grpc.RpcError as failed:
            error = from_rpc_error(failed)
        self._error = error
        self._responses.put(error)
        self._requests.put(None)


class GrpcCacheControl:
    """CacheService over a channel. Every call has a deadline; errors are `KvplaneError`s."""

    def __init__(self, channel: grpc.Channel, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        self._stub = CacheServiceStub(channel)
        self._timeout = timeout_seconds

    def open_session(self, request: cache_pb2.OpenSessionRequest) -> cache_pb2.OpenSessionResponse:
        """Take or resume a lease."""
        return self._call(self._stub.OpenSession, request)

    def heartbeat(self, request: cache_pb2.HeartbeatRequest) -> cache_pb2.HeartbeatResponse:
        """Renew a lease."""
        return self._call(self._stub.Heartbeat, request)

    def close_session(self, request: cache_pb2.CloseSessionRequest) -> cache_pb2.CloseSessionResponse:
        """End a lease."""
        return self._call(self._stub.CloseSession, request)

    def register_namespace(self, request: cache_pb2.RegisterNamespaceRequest) -> cache_pb2.RegisterNamespaceResponse:
        """Name a namespace."""
        return self._call(self._stub.RegisterNamespace, request)

    def lookup(self, request: cache_pb2.LookupRequest) -> cache_pb2.LookupResponse:
        """How much of a prompt is published."""
        return self._call(self._stub.Lookup, request)

    def get_pool(self, request: cache_pb2.GetPoolRequest) -> cache_pb2.GetPoolResponse:
        """One pool."""
        return self._call(self._stub.GetPool, request)

    def list_pools(self, request: cache_pb2.ListPoolsRequest) -> cache_pb2.ListPoolsResponse:
        """A page of pools."""
        return self._call(self._stub.ListPools, request)

    def step(self, opening: cache_pb2.StreamOpen) -> GrpcStepStream:
        """Open a session's stream; the first answer is `opened`."""
        requests: Requests = queue.SimpleQueue()
        requests.put(cache_pb2.StepRequest(open=opening))
        return GrpcStepStream(requests, self._stub.Step(iter(requests.get, None)))

    def _call(self, call: Callable[..., Response], request: object) -> Response:
        try:
            return call(request, timeout=self._timeout)
        except grpc.RpcError as failed:
            raise from_rpc_error(failed) from None


def connect(address: str | None = None, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """A channel to the cache service at `address` (default: `kvplane.wire.addresses.cache_address`)."""
    target = address or cache_address()
    if credentials is not None:
        return grpc.secure_channel(target, credentials, options=channel_options())
    return grpc.insecure_channel(target, options=channel_options())
