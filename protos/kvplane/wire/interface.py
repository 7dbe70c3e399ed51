"""The cache service as a caller sees it: one typed interface over gRPC and in process, in the contract's messages.

`kvplane.client.control` has it over gRPC, `kvplane.cache.twin` without a socket. Both raise `KvplaneError`s.
"""

from typing import Protocol

from kvplane.v1 import cache_pb2

DEFAULT_TIMEOUT_SECONDS = 10.0
"""Deadline of a call that is given none."""


class StepStream(Protocol):
    """A session's open stream."""

    def send(self, request: cache_pb2.StepRequest) -> None:
        """Send a step; at most 4 may be without an answer. Raises the error that ended the stream."""
        ...

    def receive(self, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> cache_pb2.StepResponse:
        """The next answer or notice. Raises `DeadlineExceededError`, or the error that ended the stream."""
        ...

    def close(self) -> None:
        """Cut the stream. The session lives on."""
        ...


class CacheControl(Protocol):
    """CacheService, call by call; names are those of the RPCs."""

    def open_session(self, request: cache_pb2.OpenSessionRequest) -> cache_pb2.OpenSessionResponse:
        """Take or resume a lease."""
        ...

    def heartbeat(self, request: cache_pb2.HeartbeatRequest) -> cache_pb2.HeartbeatResponse:
        """Renew a lease."""
        ...

    def close_session(self, request: cache_pb2.CloseSessionRequest) -> cache_pb2.CloseSessionResponse:
        """End a lease."""
        ...

    def register_namespace(self, request: cache_pb2.RegisterNamespaceRequest) -> cache_pb2.RegisterNamespaceResponse:
        """Name a namespace."""
        ...

    def lookup(self, request: cache_pb2.LookupRequest) -> cache_pb2.LookupResponse:
        """How much of a prompt is published."""
        ...

    def get_pool(self, request: cache_pb2.GetPoolRequest) -> cache_pb2.GetPoolResponse:
        """One pool."""
        ...

    def list_pools(self, request: cache_pb2.ListPoolsRequest) -> cache_pb2.ListPoolsResponse:
        """A page of pools."""
        ...

    def step(self, opening: cache_pb2.StreamOpen) -> StepStream:
        """Open a session's stream; the first answer is `opened`."""
        ...
