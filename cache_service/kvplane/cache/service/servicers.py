"""gRPC servicers: decode, call the control plane, encode. Errors are mapped in one place.

RPCs that are not built are answered by the generated base class: UNIMPLEMENTED.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, NoReturn, TypeVar

import grpc
import structlog

from kvplane.cache.core import Chain
from kvplane.cache.service.control_plane import DEFAULT_TENANT, ControlPlane
from kvplane.cache.service.inventories import Upload
from kvplane.cache.service.pools import RETRY_SECONDS, HostedPool
from kvplane.cache.service.prompts import long_prompts, prompt_sequence
from kvplane.cache.service.sessions import EngineSession
from kvplane.cache.service.shards import Broadcast
from kvplane.v1 import cache_pb2, registry_pb2, step_pb2
from kvplane.v1.cache_pb2_grpc import CacheServiceServicer
from kvplane.v1.registry_pb2_grpc import PoolRegistryServiceServicer
from kvplane.wire.errors import InternalError, KvplaneError, UnavailableError
from kvplane.wire.status import abort_status

_log = structlog.get_logger(__name__)

Message = TypeVar("Message")
Answer = TypeVar("Answer")
Context = grpc.aio.ServicerContext[Any, Any]


async def _refuse(context: Context, error: KvplaneError) -> NoReturn:
    await context.abort_with_status(abort_status(error))
    raise error


async def _answer(context: Context, name: str, call: Callable[[], Answer]) -> Answer:
    """Call, log one line, map what is raised."""
    try:
        answer = call()
    except KvplaneError as error:
        _log.info("rpc", rpc=name, code=error.code.name, reason=error.reason)
        await _refuse(context, error)
    except Exception:
        _log.exception("rpc", rpc=name, code="INTERNAL")
        await _refuse(context, InternalError(f"{name} failed; see the server's log"))
    _log.info("rpc", rpc=name, code="OK")
    return answer


async def _settled(name: str, broadcast: Broadcast) -> UnavailableError | None:
    """Wait until every shard has acknowledged. What a shard could not do is an error, never reported as done."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    broadcast.then(lambda _: None if future.done() else future.set_result(None))
    await future
    if not broadcast.failed:
        return None
    reasons = {command.ack.status.message for command in broadcast.commands if command.ack and command.failed}
    text = f"{name}: a shard could not do its part: {'; '.join(sorted(reasons))}"
    _log.error("rpc", rpc=name, code="UNAVAILABLE", reason=text)
    return UnavailableError(text, retry_after_seconds=RETRY_SECONDS)


@asynccontextmanager
async def _stream(context: Context, name: str, end: "StreamEnd") -> AsyncIterator[None]:
    """What ends a stream's handler: an error of ours, a newer stream, the peer, or a bug, which is logged."""
    _log.info("stream opened", rpc=name)
    # Before `end` can cancel the handler: grpc loses the status of one that is cancelled while its headers go out.
    await context.send_initial_metadata(())
    try:
        yield
    except KvplaneError as error:
        _log.info("stream ended", rpc=name, code=error.code.name, reason=error.reason)
        await _refuse(context, error)
    except asyncio.CancelledError:
        if end.error is None:
            raise
        _log.info("stream ended", rpc=name, code=end.error.code.name, reason=end.error.reason)
        await _refuse(context, end.error)
    except Exception:
        _log.exception("stream ended", rpc=name, code="INTERNAL")
        await _refuse(context, InternalError(f"{name} failed; see the server's log"))


class StreamWriter(Generic[Message]):
    """Serializes writes to a stream: grpc allows one at a time, and messages come from several tasks."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queue: deque[Message] = deque()
        self._writing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def write(self, message: Message) -> None:
        """Send a message behind those that wait already."""
        self._queue.append(message)
        await self.flush()

    def extend(self, messages: Iterable[Message]) -> None:
        """Queue messages; `flush` sends them."""
        self._queue.extend(messages)

    def put(self, message: Message) -> None:
        """Send a message from code that does not await."""
        self._queue.append(message)
        if not self._writing:
            task = asyncio.get_running_loop().create_task(self.flush())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def flush(self) -> None:
        """Send what waits, unless that is under way already."""
        if self._writing:
            return
        self._writing = True
        try:
            while self._queue:
                await self._context.write(self._queue.popleft())
        except (asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.BaseError):
            self._queue.clear()  # the stream is gone; what was not delivered is kept by the session
        finally:
            self._writing = False


class StreamEnd:
    """Lets other code end a stream's handler, with the error the peer is to see."""

    def __init__(self) -> None:
        self.error: KvplaneError | None = None
        self._task = asyncio.current_task()

    def close(self, error: KvplaneError) -> None:
        """End the handler."""
        if self.error is None:
            self.error = error
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()


class CacheServicer(CacheServiceServicer):
    """CacheService."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def OpenSession(
        self, request: cache_pb2.OpenSessionRequest, context: Context
    ) -> cache_pb2.OpenSessionResponse:
        """Take or resume a lease."""
        response, waits = await _answer(
            context, "OpenSession", lambda: self._plane.open_session(request, DEFAULT_TENANT)
        )
        failed: KvplaneError | None = InternalError("OpenSession was cancelled")
        try:
            failed = await _settled("OpenSession", waits)
        finally:
            if failed is not None and not request.resume_token:
                # Nobody learns of this session: it must not wait for its lease to run out.
                closing = cache_pb2.CloseSessionRequest(
                    session_id=response.session_id, lease_epoch=response.lease_epoch, drained=True
                )
                self._plane.close_session(closing)
        if failed is not None:
            await _refuse(context, failed)
        return response

    async def Heartbeat(self, request: cache_pb2.HeartbeatRequest, context: Context) -> cache_pb2.HeartbeatResponse:
        """Renew a lease."""
        return await _answer(context, "Heartbeat", lambda: self._plane.heartbeat(request))

    async def CloseSession(
        self, request: cache_pb2.CloseSessionRequest, context: Context
    ) -> cache_pb2.CloseSessionResponse:
        """End a lease."""
        return await _answer(context, "CloseSession", lambda: self._plane.close_session(request))

    async def RegisterNamespace(
        self, request: cache_pb2.RegisterNamespaceRequest, context: Context
    ) -> cache_pb2.RegisterNamespaceResponse:
        """Name a namespace."""
        response, waits = await _answer(context, "RegisterNamespace", lambda: self._plane.register_namespace(request))
        failed = await _settled("RegisterNamespace", waits)
        if failed is not None:
            await _refuse(context, failed)
        return response

    async def Lookup(self, request: cache_pb2.LookupRequest, context: Context) -> cache_pb2.LookupResponse:
        """How much of a prompt is published."""
        hashed: dict[int, Chain] = {}
        with suppress(KvplaneError):
            bound = self._plane.session(request.session_id, request.lease_epoch)
            hashed = await self._hash_ahead(*bound, [prompt_sequence(request.prompt)])
        return await _answer(context, "Lookup", lambda: self._plane.lookup(request, next(iter(hashed.values()), None)))

    async def GetPool(self, request: cache_pb2.GetPoolRequest, context: Context) -> cache_pb2.GetPoolResponse:
        """One pool."""
        return await _answer(context, "GetPool", lambda: self._plane.get_pool(request))

    async def ListPools(self, request: cache_pb2.ListPoolsRequest, context: Context) -> cache_pb2.ListPoolsResponse:
        """A page of pools."""
        return await _answer(context, "ListPools", lambda: self._plane.list_pools(request))

    async def Step(  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride] - it writes, it does not yield
        self, request_iterator: AsyncIterator[cache_pb2.StepRequest], context: Context
    ) -> None:
        """A session's stream: one answer per step, notices in between (written with `context.write`)."""
        writer: StreamWriter[cache_pb2.StepResponse] = StreamWriter(context)
        end = StreamEnd()
        push = writer.put
        bound: tuple[HostedPool, EngineSession] | None = None
        try:
            async with _stream(context, "Step", end):
                async for request in request_iterator:
                    if bound is None:
                        pool, session, responses = self._plane.open_stream(request, push, end.close)
                        bound = (pool, session)
                        # All at once: a notice that comes meanwhile must not overtake older ones.
                        writer.extend(responses)
                        await writer.flush()
                        continue
                    step, chains = request.step, {}
                    if step.HasField("admit"):
                        chains = await self._hash_ahead(*bound, step.admit.sequences)
                    elif request.HasField("declaration"):
                        sequences = [each.sequence for each in request.declaration.sequences]
                        chains = await self._hash_ahead(*bound, sequences)
                    response = self._plane.step(*bound, request, chains)
                    if response is not None:
                        await writer.write(response)
        finally:
            if bound is not None and bound[1].push is push:
                bound[1].push = bound[1].close_stream = None

    async def _hash_ahead(
        self, pool: HostedPool, session: EngineSession, sequences: Sequence[step_pb2.NewSequence]
    ) -> dict[int, Chain]:
        """Hash long prompts in slices and let other sessions in between: what follows stays short."""
        chains = {}
        for prompt in long_prompts(pool, session, sequences, self._plane.config.max_prompt_tokens):
            while prompt.hash_slice():
                await asyncio.sleep(0)
            if prompt.chain is not None:
                chains[prompt.sequence_id] = prompt.chain
        return chains


class RegistryServicer(PoolRegistryServiceServicer):
    """PoolRegistryService."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def Register(self, request: registry_pb2.RegisterRequest, context: Context) -> registry_pb2.RegisterResponse:
        """Admit a shard."""
        return await _answer(context, "Register", lambda: self._plane.registrations.register(request))

    async def Control(  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride] - it writes, it does not yield
        self, request_iterator: AsyncIterator[registry_pb2.ControlRequest], context: Context
    ) -> None:
        """A shard's stream: commands down, acknowledgements and events up (written with `context.write`)."""
        writer: StreamWriter[registry_pb2.ControlResponse] = StreamWriter(context)
        sender, end, registrations = writer.put, StreamEnd(), self._plane.registrations
        bound = None
        try:
            async with _stream(context, "Control", end):
                async for request in request_iterator:
                    if bound is None:
                        bound = registrations.open_control(request, sender, end.close)
                    else:
                        registrations.control(*bound, request)
                    if end.error is not None:
                        raise end.error
        finally:
            if bound is not None:
                registrations.lost(*bound, sender)

    async def Inventory(
        self, request_iterator: AsyncIterator[registry_pb2.InventoryRequest], context: Context
    ) -> registry_pb2.InventoryResponse:
        """A shard uploads its directory."""
        upload: Upload | None = None
        async with _stream(context, "Inventory", StreamEnd()):
            async for chunk in request_iterator:
                upload = self._plane.registrations.inventory(chunk, upload)
        return registry_pb2.InventoryResponse(num_rows=upload.num_rows if upload is not None else 0)
