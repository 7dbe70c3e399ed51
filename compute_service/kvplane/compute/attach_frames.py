"""Framing of the attach socket: a little-endian u32 length, the message, descriptors with its first byte."""

import asyncio
import socket
import struct

from google.protobuf.message import DecodeError

from kvplane.v1 import attach_pb2
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.limits import ATTACH_MESSAGE_BYTES

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("iII")


async def receive(connection: socket.socket) -> attach_pb2.AttachToService | None:
    """The next message; None at the end of the stream. Raises `InvalidArgumentError` for what is no message."""
    loop = asyncio.get_running_loop()
    head = await _exactly(loop, connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > ATTACH_MESSAGE_BYTES:
        raise InvalidArgumentError.of("length", f"{length} bytes, at most {ATTACH_MESSAGE_BYTES} are allowed")
    body = await _exactly(loop, connection, length)
    if body is None:
        return None
    try:
        return attach_pb2.AttachToService.FromString(body)
    except DecodeError as error:
        raise InvalidArgumentError.of("message", "does not parse") from error


async def send(connection: socket.socket, message: attach_pb2.AttachToProcess, descriptors: list[int]) -> None:
    """Send a message; the descriptors go with its first byte and stay ours. Raises `OSError` when the peer is gone."""
    body = message.SerializeToString()
    packed = _LENGTH.pack(len(body)) + body
    loop = asyncio.get_running_loop()
    sent = 0
    if descriptors:
        # The first byte of a fresh connection always fits the socket's buffer.
        sent = socket.send_fds(connection, [packed], descriptors)
    await loop.sock_sendall(connection, packed[sent:])


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel says; process 0 when its PID namespace is hidden from here."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(packed)
    return pid, user


async def _exactly(loop: asyncio.AbstractEventLoop, connection: socket.socket, count: int) -> bytes | None:
    parts = b""
    while len(parts) < count:
        part = await loop.sock_recv(connection, count - len(parts))
        if not part:
            return None
        parts += part
    return parts
