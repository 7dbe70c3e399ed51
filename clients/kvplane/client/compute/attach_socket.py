"""The engine's end of an attach: a ticket by RPC, descriptors over a Unix socket, then words about the lease."""

import os
import socket
import struct
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from kvplane.client.compute.topology import at_shard
from kvplane.client.state import SessionState
from kvplane.v1 import attach_pb2, compute_pb2, types_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire.errors import PreconditionError
from kvplane.wire.limits import ATTACH_MESSAGE_BYTES
from kvplane.wire.status import from_rpc_error, from_status

_LENGTH = struct.Struct("<I")
_MOST_DESCRIPTORS = 64

NOT_REACHABLE = "ATTACH_SOCKET_NOT_REACHABLE"
"""Reason of an error: the shard's attach socket cannot be connected to, most likely since it is on another host."""


@dataclass(slots=True, eq=False)
class Attachment:
    """An answered hello: memory handles, and the connection, which keeps an arena alive and carries ends of leases."""

    shard: types_pb2.Shard
    reply: attach_pb2.AttachReply
    connection: socket.socket
    descriptors: list[int]

    def receive(self) -> attach_pb2.AttachToProcess | None:
        """The next message; None once the service or `wake` has closed the connection."""
        try:
            return _receive(self.connection)[0]
        except (OSError, DecodeError):
            return None

    def send_drained(self, lease_epoch: int) -> None:
        """Say that everything launched has completed and that nothing more will be. A peer that is gone knows."""
        drained = attach_pb2.AttachDrained(lease_epoch=lease_epoch)
        try:
            _send(self.connection, attach_pb2.AttachToService(drained=drained))
        except OSError:
            return

    def wake(self) -> None:
        """End a `receive` that waits in another thread; what was sent still arrives."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close_descriptors(self) -> None:
        """Close what was passed: mappings do not need it."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def close(self) -> None:
        """Close everything."""
        self.close_descriptors()
        self.connection.close()


def attach(
    stub: ComputeServiceStub,
    state: SessionState,
    shard: types_pb2.Shard,
    purpose: compute_pb2.AttachPurpose.ValueType,
    *,
    timeout_seconds: float,
    rank: int = 0,
    arena_bytes: int = 0,
) -> Attachment:
    """Attach to one shard. Raises what the service answers, with the shard named, and `PreconditionError` (reason
    `NOT_REACHABLE`) when its socket cannot be connected to or does not answer."""
    request = compute_pb2.AttachRequest(
        session_id=state.session_id,
        lease_epoch=state.lease_epoch,
        session_secret=state.secret,
        purpose=purpose,
        rank=rank,
        arena_bytes=arena_bytes,
    )
    try:
        answer = stub.Attach(request, timeout=timeout_seconds)
    except grpc.RpcError as failed:
        raise at_shard(from_rpc_error(failed), shard) from None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(answer.socket_path)
        _send(connection, attach_pb2.AttachToService(hello=attach_pb2.AttachHello(ticket=answer.ticket)))
        message, descriptors = _receive(connection)
    except (OSError, DecodeError) as error:
        connection.close()
        refused = PreconditionError(
            f"the attach socket {answer.socket_path} does not answer: {error}", reason=NOT_REACHABLE
        )
        raise at_shard(refused, shard) from error
    made = Attachment(shard, attach_pb2.AttachReply(), connection, descriptors)
    if message is None or not message.HasField("reply"):
        made.close()
        raise at_shard(PreconditionError("the attach socket closed without a reply", reason=NOT_REACHABLE), shard)
    made.reply = message.reply
    if made.reply.status.code:
        made.close()
        raise at_shard(from_status(made.reply.status), shard)
    connection.settimeout(None)
    return made


def _send(connection: socket.socket, message: attach_pb2.AttachToService) -> None:
    body = message.SerializeToString()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket) -> tuple[attach_pb2.AttachToProcess | None, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_DESCRIPTORS)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    try:
        head += _exactly(connection, _LENGTH.size - len(head)) if head else b""
        if len(head) < _LENGTH.size:
            return None, descriptors
        (length,) = _LENGTH.unpack(head)
        if length > ATTACH_MESSAGE_BYTES:
            raise DecodeError(f"a message of {length} bytes, at most {ATTACH_MESSAGE_BYTES} are allowed")
        return attach_pb2.AttachToProcess.FromString(_exactly(connection, length)), descriptors
    except (OSError, DecodeError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise DecodeError(f"the message ends after {len(parts)} of {count} bytes")
        parts += part
    return parts
