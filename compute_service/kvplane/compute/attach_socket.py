"""The attach socket: a hello with a ticket, an answer with descriptors, then what each side has to tell the other."""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

import structlog

from kvplane.compute import attach_frames
from kvplane.compute.attach_reply import Reply
from kvplane.compute.attachments import Attachments, Connection
from kvplane.compute.tickets import Ticket
from kvplane.v1 import attach_pb2, compute_pb2
from kvplane.wire import features
from kvplane.wire.errors import InvalidArgumentError, KvplaneError, PreconditionError
from kvplane.wire.status import to_status

_log = structlog.get_logger(__name__)

HELLO_SECONDS = 10.0
"""Time in which a hello has to come."""
BACKLOG = 64
ACCEPT_PAUSE_SECONDS = 0.1
"""Time between a failed accept and the next."""


class AttachSocket:
    """Listens, and serves each connection in a task of its own."""

    def __init__(self, path: Path, attachments: Attachments) -> None:
        self.path = path
        self._attachments = attachments
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Bind and listen. Raises `RuntimeError` that names a path which cannot be bound."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(os.fspath(self.path))
            raise RuntimeError(f"attach_socket: another process listens on {self.path}")
        self.path.unlink(missing_ok=True)
        try:
            self._listener.bind(os.fspath(self.path))
        except OSError as error:
            raise RuntimeError(f"attach_socket: cannot bind {self.path}: {error.strerror}") from error
        self.path.chmod(0o600)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """Stop listening and close connections; mappings stay with their processes."""
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._accepting is not None:
            self.path.unlink(missing_ok=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # Out of descriptors, most likely: others may give some back.
                _log.warning("attach socket cannot accept", reason=error.strerror)
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            task = loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: socket.socket) -> None:
        connection: Connection | None = None
        arena_id = 0
        try:
            with peer:
                reply, connection, arena_id = await self._greet(peer)
                # Before anything is waited for: a fence that comes now is told, right after the reply.
                self._attachments.connected(connection)
                try:
                    await attach_frames.send(peer, attach_pb2.AttachToProcess(reply=reply.message), reply.descriptors)
                finally:
                    reply.close()
                await self._converse(peer, connection)
        except KvplaneError as error:
            _log.info("attach refused", reason=error.reason, message=error.message)
        except OSError:
            pass
        finally:
            if connection is not None:
                self._attachments.disconnected(connection)
            if arena_id:
                self._attachments.arenas.close(arena_id)

    async def _greet(self, peer: socket.socket) -> tuple[Reply, Connection, int]:
        """Answer the hello, with an error when it is refused; then the error is raised as well."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await attach_frames.receive(peer)
            if first is None or not first.HasField("hello"):
                raise InvalidArgumentError.of("hello", "must be the first message")
            features.require(first.hello.required_features)
            ticket = self._attachments.tickets.take(first.hello.ticket)
            return await self._admit(peer, ticket)
        except TimeoutError as error:
            raise InvalidArgumentError.of("hello", "did not come in time") from error
        except KvplaneError as error:
            refusal = attach_pb2.AttachToProcess(reply=attach_pb2.AttachReply(status=to_status(error)))
            with suppress(OSError):
                await attach_frames.send(peer, refusal, [])
            raise

    async def _admit(self, peer: socket.socket, ticket: Ticket) -> tuple[Reply, Connection, int]:
        attachments = self._attachments
        pid, user = attach_frames.peer(peer)
        if user not in (os.getuid(), 0):
            raise PreconditionError(f"user {user} is not the user of this service, {os.getuid()}", reason="OTHER_USER")
        connection = Connection(ticket.session_id, ticket.lease_epoch, asyncio.Queue())
        if ticket.purpose == compute_pb2.ATTACH_PURPOSE_ARENA:
            reply, arena_id = await attachments.arena(ticket.session_id, ticket.lease_epoch, ticket.arena_bytes)
            return reply, connection, arena_id
        if pid == 0:
            raise PreconditionError(
                "the process is in a PID namespace that is hidden from this service: share it (pid: service:… or host)",
                reason="PID_NAMESPACE_HIDDEN",
            )
        reply, process = await attachments.attach(ticket.session_id, ticket.lease_epoch, pid, ticket.rank)
        connection.process = process
        return reply, connection, 0

    async def _converse(self, peer: socket.socket, connection: Connection) -> None:
        sender = asyncio.create_task(self._send(peer, connection))
        try:
            while (message := await attach_frames.receive(peer)) is not None:
                if message.HasField("drained"):
                    self._attachments.drained(connection, message.drained.lease_epoch)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send(self, peer: socket.socket, connection: Connection) -> None:
        while True:
            await attach_frames.send(peer, await connection.messages.get(), [])
