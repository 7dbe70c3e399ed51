"""The cache service without a socket: for tests that compare, and for replaying traces.

It is the same control plane behind the same interface; only the transport, the clock and the shards differ: time
stands still unless it is told to pass, and the shards hold no bytes and acknowledge at once.
"""

from collections import deque
from collections.abc import Callable

from kvplane.cache.service.config import CacheConfig
from kvplane.cache.service.control_plane import DEFAULT_TENANT, ControlPlane
from kvplane.cache.service.pools import HostedPool
from kvplane.cache.service.registrations import SHARD_FEATURES
from kvplane.cache.service.sessions import EngineSession
from kvplane.cache.service.shards import ShardLink
from kvplane.v1 import cache_pb2, registry_pb2, types_pb2
from kvplane.wire import directory
from kvplane.wire.errors import CancelledError, DeadlineExceededError, KvplaneError
from kvplane.wire.interface import DEFAULT_TIMEOUT_SECONDS


class TwinStepStream:
    """A session's stream in process: a step is answered before `send` returns."""

    def __init__(self, twin: "InProcessCacheControl", opening: cache_pb2.StreamOpen) -> None:
        self._twin = twin
        self._responses: deque[cache_pb2.StepResponse] = deque()
        self._error: KvplaneError | None = None
        self._push = self._responses.append
        self._bound: tuple[HostedPool, EngineSession] | None = None
        try:
            pool, session, first = twin.plane.open_stream(cache_pb2.StepRequest(open=opening), self._push, self._end)
        except KvplaneError as error:
            self._error = error
            return
        self._bound = (pool, session)
        self._responses.extend(first)

    def send(self, request: cache_pb2.StepRequest) -> None:
        """Apply a step. Raises the error that ended the stream."""
        if self._error is not None:
            raise self._error
        assert self._bound is not None
        try:
            response = self._twin.plane.step(*self._bound, request, {})
            if response is not None:
                self._responses.append(response)
        except KvplaneError as error:
            self._end(error)
        self._twin.run_due()

    def receive(self, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> cache_pb2.StepResponse:
        """The next answer or notice. Raises `DeadlineExceededError` at once when there is none."""
        if self._responses:
            return self._responses.popleft()
        if self._error is not None:
            raise self._error
        raise DeadlineExceededError(f"no message, and none will come within {timeout:g} s")

    def close(self) -> None:
        """Cut the stream. The session lives on."""
        self._end(CancelledError("the stream was closed"))

    def _end(self, error: KvplaneError) -> None:
        self._error = self._error or error
        if self._bound is not None and self._bound[1].push == self._push:
            self._bound[1].push = self._bound[1].close_stream = None


class InProcessCacheControl:
    """In-process twin of the gRPC client: `CacheControl` over a control plane of its own."""

    def __init__(self, config: CacheConfig) -> None:
        self.now = 0.0
        self._links: list[ShardLink] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self.plane = ControlPlane(config, lambda: self.now, self._call_later)

    def open_session(self, request: cache_pb2.OpenSessionRequest) -> cache_pb2.OpenSessionResponse:
        """Take or resume a lease."""
        return self.plane.open_session(request, DEFAULT_TENANT)[0]

    def heartbeat(self, request: cache_pb2.HeartbeatRequest) -> cache_pb2.HeartbeatResponse:
        """Renew a lease."""
        return self.plane.heartbeat(request)

    def close_session(self, request: cache_pb2.CloseSessionRequest) -> cache_pb2.CloseSessionResponse:
        """End a lease."""
        return self.plane.close_session(request)

    def register_namespace(self, request: cache_pb2.RegisterNamespaceRequest) -> cache_pb2.RegisterNamespaceResponse:
        """Name a namespace."""
        return self.plane.register_namespace(request)[0]

    def lookup(self, request: cache_pb2.LookupRequest) -> cache_pb2.LookupResponse:
        """How much of a prompt is published."""
        return self.plane.lookup(request)

    def get_pool(self, request: cache_pb2.GetPoolRequest) -> cache_pb2.GetPoolResponse:
        """One pool."""
        return self.plane.get_pool(request)

    def list_pools(self, request: cache_pb2.ListPoolsRequest) -> cache_pb2.ListPoolsResponse:
        """A page of pools."""
        return self.plane.list_pools(request)

    def step(self, opening: cache_pb2.StreamOpen) -> TwinStepStream:
        """Open a session's stream; the first answer is `opened`."""
        return TwinStepStream(self, opening)

    def add_shard(
        self, pool_id: str, model: types_pb2.ModelIdentity, groups: list[types_pb2.GroupSpec], num_blocks: int
    ) -> None:
        """Give a pool its one shard, which holds no bytes and acknowledges at once; the pool opens."""
        request = registry_pb2.RegisterRequest(
            pool_id=pool_id,
            boot_id=1,
            shard=types_pb2.ShardSpec(rank=0, world_size=1),
            model=model,
            groups=groups,
            directory_version=directory.VERSION,
            max_blocks=num_blocks,
            features=SHARD_FEATURES,
        )
        registered = self.plane.registrations.register(request)
        opening = registry_pb2.ControlRequest(
            incarnation=registered.incarnation,
            boot_id=1,
            open=registry_pb2.ControlOpen(registration_id=registered.registration_id),
        )
        unsent: deque[registry_pb2.ControlResponse] = deque()
        _, link = self.plane.registrations.open_control(opening, unsent.append, lambda _: None)
        while unsent:
            link.acknowledged(registry_pb2.CommandAck(sequence=unsent.popleft().sequence))
        link.sender = lambda command: link.acknowledged(registry_pb2.CommandAck(sequence=command.sequence))
        self._links.append(link)

    def advance(self, seconds: float) -> None:
        """Let time pass: leases run out, seals go out."""
        self.now += seconds
        for link in self._links:
            link.last_heard = self.now
        self.plane.tick()
        self.run_due()

    def run_due(self) -> None:
        """Run what was to be called back by now."""
        while self._due and min(when for when, _ in self._due) <= self.now:
            self._due.sort(key=lambda each: each[0])
            self._due.pop(0)[1]()

    def _call_later(self, delay: float, call: Callable[[], None]) -> None:
        self._due.append((self.now + delay, call))
