"""A session for engines without an event loop."""

import time
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

import grpc

from kvplane.client import decode
from kvplane.client.control import GrpcCacheControl, connect
from kvplane.client.draft import Integers, StepDraft
from kvplane.client.lease import Lease
from kvplane.client.link import Heartbeat, StepLink
from kvplane.client.opening import (
    RETRY_SECONDS,
    close_request,
    lookup_request,
    namespace_request,
    open_request,
)
from kvplane.client.sequences import SequenceTable
from kvplane.client.state import SessionState
from kvplane.client.values import Hit, StepResult
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire.errors import DeadlineExceededError, KvplaneError, PreconditionError, UnavailableError
from kvplane.wire.interface import DEFAULT_TIMEOUT_SECONDS, CacheControl

SEAL_SECONDS = 0.005
"""How often seals go out: asking for what is published more often than that is in vain."""


class Session:
    """An engine's lease on a pool. Use it from one thread; make one with `open`, and as a context manager.

    A step that was sent is never lost and never applied twice: when the stream breaks, the session opens it again and
    repeats what has no answer. Errors are `kvplane.wire.errors.KvplaneError`s with reason, metadata and
    `retry_after_seconds`.
    """

    def __init__(
        self,
        control: CacheControl,
        state: SessionState,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        channel: grpc.Channel | None = None,
    ) -> None:
        self.state = state
        self._control = control
        self._timeout = timeout
        self._channel = channel
        self._link = StepLink(control, state, timeout)
        self._heartbeat = Heartbeat(control, state, self._link)

    @classmethod
    def open(
        cls,
        pool_id: str = "default",
        *,
        mode: Literal["attached", "remote"] = "attached",
        address: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        control: CacheControl | None = None,
        model: types_pb2.ModelIdentity | None = None,
        layout: types_pb2.LayoutIdentity | None = None,
        namespace: cache_pb2.NamespaceSpec | None = None,
        ttl_seconds: float = 10.0,
        num_ranks: int = 1,
        max_sequences: int = 1024,
        engine_name: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Self:
        """Take a lease.

        `address` is that of the cache service (default: `$KVPLANE_ADDRESS`, or the socket in the runtime directory);
        `control` takes its place, with any other way to the service. `model` None takes the pool's word for it: an
        engine that computes KV says which model it has, and a mismatch is refused. `timeout` is how long a service that
        is not ready is asked again, and the deadline of every later call, in seconds.
        """
        channel = None
        if control is None:
            channel = connect(address, credentials)
            control = GrpcCacheControl(channel, timeout)
        try:
            deadline = time.monotonic() + timeout
            while True:
                try:
                    request = open_request(
                        pool_id,
                        mode,
                        model or control.get_pool(cache_pb2.GetPoolRequest(pool_id=pool_id)).pool.model,
                        layout=layout,
                        namespace=namespace,
                        ttl_seconds=ttl_seconds,
                        num_ranks=num_ranks,
                        max_sequences=max_sequences,
                        engine_name=engine_name,
                    )
                    lease = Lease(ttl_seconds)
                    state = SessionState(control.open_session(request), mode, lease, num_ranks)
                    return cls(control, state, timeout, channel)
                except UnavailableError as error:
                    pause = error.retry_after_seconds or RETRY_SECONDS
                    if time.monotonic() + pause > deadline:
                        raise
                    time.sleep(pause)
        except BaseException:
            if channel is not None:
                channel.close()
            raise

    @property
    def session_id(self) -> int:
        """Identity."""
        return self.state.session_id

    @property
    def pool(self) -> types_pb2.Pool:
        """The pool as it was when the session was opened."""
        return self.state.pool

    @property
    def sequences(self) -> SequenceTable:
        """Block tables and lengths as of the last result."""
        return self.state.sequences

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.state.block_tokens

    # Steps

    def draft(self) -> StepDraft:
        """A new, empty step. Raises `SessionClosedError`, `ForkedProcessError`."""
        return self.state.draft()

    def submit(self, draft: StepDraft) -> int:
        """Send a step without waiting for its answer; returns its id. At most 4 may be without one
        (`LimitExceededError`). Plans may be made and run meanwhile: the tables stay as they are until an answer is
        collected. While the heartbeat resumes the session at a restarted service, this waits for that."""
        return self._link.submit(draft)

    def collect(self, timeout: float | None = None) -> StepResult:
        """The next result, in the order of the steps.

        Raises the error of a rejected step (which changed nothing), `DeadlineExceededError` (it may be collected
        later), `UnavailableError` while the service is away, `SessionExpiredError` or `StaleEpochError` when the lease
        is gone.
        """
        self.state.check_usable()
        if not self.state.unanswered:
            raise PreconditionError("no step is on its way; submit one first")
        return self._link.receive(time.monotonic() + (self._timeout if timeout is None else timeout))

    def run(self, draft: StepDraft, timeout: float | None = None) -> StepResult:
        """Send a step and wait for its result. Raises `PreconditionError` while earlier ones have no answer.

        One that is late has to be collected before the next plan is made."""
        if self.state.unanswered:
            raise PreconditionError(f"{self.state.unanswered} steps have no answer; collect them first")
        self._link.submit(draft, overlapped=False)
        return self.collect(timeout)

    def flush(self, timeout: float | None = None) -> tuple[StepResult, ...]:
        """Wait until everything that this session has committed is published; returns the results of the empty steps
        that asked. Raises like `run`."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        target = self.state.last_sent_step
        results: list[StepResult] = []
        while True:
            results.append(self.run(self.draft(), max(0.0, deadline - time.monotonic())))
            if results[-1].published_step >= target:
                return tuple(results)
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"step {target} is not published within the time given")
            time.sleep(SEAL_SECONDS)

    def complete(self, step_id: int, rank: int = 0) -> None:
        """All that was launched on tables up to `step_id` has completed. Compute access says so itself."""
        self.state.complete(step_id, rank)

    # Beside the stream

    def lookup(self, tokens: Integers, namespace_id: int = 0, max_hit_tokens: int | None = None) -> Hit:
        """How much of a prompt is published. It protects nothing: only an admission holds blocks."""
        self.state.check_usable()
        found = self._control.lookup(lookup_request(self.state, tokens, namespace_id, max_hit_tokens))
        return Hit(found.hit_tokens, decode.hit_reason(found.hit_reason))

    def register_namespace(self, adapter_id: str = "", adapter_revision: str = "", sub_salt: bytes = b"") -> int:
        """Id of a namespace for `StepDraft.admit`: who may share prefixes with whom."""
        self.state.check_usable()
        request = namespace_request(self.state, adapter_id, adapter_revision, sub_salt)
        return self._control.register_namespace(request).namespace_id

    def close(self) -> None:
        """End the lease: held blocks are let go of, published ones stay. A service that is away is not waited for; the
        lease runs out by itself. Closing twice is allowed. Raises `ForkedProcessError`."""
        if self.state.closed:
            return
        self.state.check_usable()
        self.state.closed = True
        try:
            self._heartbeat.stop()
            self._link.close()
            with suppress(UnavailableError, DeadlineExceededError):
                self._control.close_session(close_request(self.state))
        finally:
            if self._channel is not None:
                self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(KvplaneError):  # the error of the body is the one to see
            self.close()
