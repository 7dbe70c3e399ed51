"""A session for engines with an event loop: `Session` with `await`."""

import asyncio
import time
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

import grpc

from kvplane.client import decode
from kvplane.client.aio_control import AioCacheControl, connect_aio
from kvplane.client.aio_link import AioHeartbeat, AioStepLink
from kvplane.client.draft import Integers, StepDraft
from kvplane.client.lease import Lease
from kvplane.client.opening import RETRY_SECONDS, close_request, lookup_request, namespace_request, open_request
from kvplane.client.sequences import SequenceTable
from kvplane.client.session import SEAL_SECONDS
from kvplane.client.state import SessionState
from kvplane.client.values import Hit, StepResult
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire.errors import DeadlineExceededError, KvplaneError, PreconditionError, UnavailableError
from kvplane.wire.interface import DEFAULT_TIMEOUT_SECONDS


class AsyncSession:
    """An engine's lease on a pool. Use it from one task; make one with `await AsyncSession.open()`.

    The same promises as `kvplane.client.Session`.
    """

    def __init__(
        self, control: AioCacheControl, state: SessionState, timeout: float, channel: grpc.aio.Channel
    ) -> None:
        self.state = state
        self._control = control
        self._timeout = timeout
        self._channel = channel
        self._link = AioStepLink(control, state)
        self._heartbeat = AioHeartbeat(control, state, self._link)

    @classmethod
    async def open(
        cls,
        pool_id: str = "default",
        *,
        mode: Literal["attached", "remote"] = "attached",
        address: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        model: types_pb2.ModelIdentity | None = None,
        layout: types_pb2.LayoutIdentity | None = None,
        namespace: cache_pb2.NamespaceSpec | None = None,
        ttl_seconds: float = 10.0,
        num_ranks: int = 1,
        max_sequences: int = 1024,
        engine_name: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Self:
        """Take a lease; see `Session.open`."""
        channel = connect_aio(address, credentials)
        control = AioCacheControl(channel, timeout)
        try:
            deadline = time.monotonic() + timeout
            while True:
                try:
                    identity = model
                    if identity is None:
                        found = await control.get_pool(cache_pb2.GetPoolRequest(pool_id=pool_id))
                        identity = found.pool.model
                    request = open_request(
                        pool_id,
                        mode,
                        identity,
                        layout=layout,
                        namespace=namespace,
                        ttl_seconds=ttl_seconds,
                        num_ranks=num_ranks,
                        max_sequences=max_sequences,
                        engine_name=engine_name,
                    )
                    lease = Lease(ttl_seconds)
                    opened = await control.open_session(request)
                    break
                except UnavailableError as error:
                    pause = error.retry_after_seconds or RETRY_SECONDS
                    if time.monotonic() + pause > deadline:
                        raise
                    await asyncio.sleep(pause)
            session = cls(control, SessionState(opened, mode, lease, num_ranks), timeout, channel)
            try:
                await session._link.open(timeout)
            except BaseException:
                await session._heartbeat.stop()
                raise
        except BaseException:
            await channel.close()
            raise
        return session

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

    def draft(self) -> StepDraft:
        """A new, empty step. Raises `SessionClosedError`, `ForkedProcessError`."""
        return self.state.draft()

    async def submit(self, draft: StepDraft) -> int:
        """Send a step without waiting for its answer; returns its id. See `Session.submit`."""
        return await self._link.submit(draft)

    async def collect(self, timeout: float | None = None) -> StepResult:
        """The next result, in the order of the steps. Raises like `Session.collect`."""
        self.state.check_usable()
        if not self.state.unanswered:
            raise PreconditionError("no step is on its way; submit one first")
        return await self._link.receive(time.monotonic() + (self._timeout if timeout is None else timeout))

    async def run(self, draft: StepDraft, timeout: float | None = None) -> StepResult:
        """Send a step and wait for its result. Raises `PreconditionError` while earlier ones have no answer."""
        if self.state.unanswered:
            raise PreconditionError(f"{self.state.unanswered} steps have no answer; collect them first")
        await self._link.submit(draft, overlapped=False)
        return await self.collect(timeout)

    async def flush(self, timeout: float | None = None) -> tuple[StepResult, ...]:
        """Wait until everything that this session has committed is published. See `Session.flush`."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        target = self.state.last_sent_step
        results: list[StepResult] = []
        while True:
            results.append(await self.run(self.draft(), max(0.0, deadline - time.monotonic())))
            if results[-1].published_step >= target:
                return tuple(results)
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"step {target} is not published within the time given")
            await asyncio.sleep(SEAL_SECONDS)

    def complete(self, step_id: int, rank: int = 0) -> None:
        """All that was launched on tables up to `step_id` has completed. Compute access says so itself."""
        self.state.complete(step_id, rank)

    async def lookup(self, tokens: Integers, namespace_id: int = 0, max_hit_tokens: int | None = None) -> Hit:
        """How much of a prompt is published. It protects nothing: only an admission holds blocks."""
        self.state.check_usable()
        found = await self._control.lookup(lookup_request(self.state, tokens, namespace_id, max_hit_tokens))
        return Hit(found.hit_tokens, decode.hit_reason(found.hit_reason))

    async def register_namespace(self, adapter_id: str = "", adapter_revision: str = "", sub_salt: bytes = b"") -> int:
        """Id of a namespace for `StepDraft.admit`: who may share prefixes with whom."""
        self.state.check_usable()
        request = namespace_request(self.state, adapter_id, adapter_revision, sub_salt)
        return (await self._control.register_namespace(request)).namespace_id

    async def close(self) -> None:
        """End the lease. See `Session.close`."""
        if self.state.closed:
            return
        self.state.check_usable()
        self.state.closed = True
        try:
            await self._heartbeat.stop()
            await self._link.close()
            with suppress(UnavailableError, DeadlineExceededError):
                await self._control.close_session(close_request(self.state))
        finally:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        with suppress(KvplaneError):
            await self.close()
