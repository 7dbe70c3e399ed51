"""An attached engine: it maps the pool and works on it by itself. As a script it is a process of its own.

    python compute_attached.py ADDRESS SESSION_ID LEASE_EPOCH SECRET_HEX RANK

It then obeys lines on its standard input: `write BLOCK GENERATION SEED`, `drain`, `exit`.
"""

import mmap
import os
import socket
import struct
import sys
from dataclasses import dataclass

import grpc
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvplane.compute.dtypes import torch_dtype
from kvplane.v1 import attach_pb2, compute_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire import directory, stamps
from kvplane.wire.options import channel_options
from kvplane.wire.status import from_status

_LENGTH = struct.Struct("<I")


@dataclass(eq=False)
class Attached:
    """Memory of a compute service, and the connection that it came by."""

    reply: attach_pb2.AttachReply
    connection: socket.socket
    descriptors: list[int]
    mappings: list[mmap.mmap]

    @property
    def directory(self) -> directory.Directory:
        return directory.open_directory(memoryview(self.mappings[self.reply.directory_handle]))

    @property
    def stamps(self) -> npt.NDArray[np.uint64]:
        return stamps.open_stamps(memoryview(self.mappings[self.reply.stamps_handle]))

    @property
    def hold_map(self) -> npt.NDArray[np.uint8]:
        return stamps.open_hold_map(memoryview(self.mappings[self.reply.hold_map_handle]))

    def blocks(self, layer: int, role: int) -> Tensor:
        """A tensor of the pool, as the reply describes it."""
        place = next(each for each in self.reply.segments if (each.layer, each.role) == (layer, role))
        dtype = torch_dtype(place.dtype, "dtype")
        flat = torch.frombuffer(self.mappings[place.handle_index], dtype=dtype)
        strides = [stride // dtype.itemsize for stride in place.strides_bytes]
        return flat.as_strided(list(place.shape), strides, place.offset // dtype.itemsize)

    def receive(self) -> attach_pb2.AttachToProcess:
        return receive(self.connection)[0]

    def drained(self, lease_epoch: int) -> None:
        message = attach_pb2.AttachToService(drained=attach_pb2.AttachDrained(lease_epoch=lease_epoch))
        send(self.connection, message)

    def close(self) -> None:
        self.connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def send(connection: socket.socket, message: attach_pb2.AttachToService) -> None:
    body = message.SerializeToString()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> tuple[attach_pb2.AttachToProcess, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 16)
    body = b""
    (length,) = _LENGTH.unpack(head)
    while len(body) < length:
        body += connection.recv(length - len(body))
    return attach_pb2.AttachToProcess.FromString(body), descriptors


def hello(path: str, ticket: bytes) -> Attached:
    """Show a ticket. A refusal is raised."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    send(connection, attach_pb2.AttachToService(hello=attach_pb2.AttachHello(ticket=ticket)))
    message, descriptors = receive(connection)
    if message.reply.status.code:
        connection.close()
        raise from_status(message.reply.status)
    mappings = []
    for index, (handle, descriptor) in enumerate(zip(message.reply.handles, descriptors, strict=True)):
        reads = len(message.reply.handles) > 1 and index == message.reply.directory_handle
        access = mmap.ACCESS_READ if reads else mmap.ACCESS_WRITE
        mappings.append(mmap.mmap(descriptor, handle.num_bytes, access=access))
    return Attached(message.reply, connection, descriptors, mappings)


def attach(
    address: str,
    session_id: int,
    lease_epoch: int,
    secret: bytes,
    rank: int = 0,
    purpose: compute_pb2.AttachPurpose.ValueType = compute_pb2.ATTACH_PURPOSE_POOL,
    arena_bytes: int = 0,
) -> Attached:
    """Attach over both sockets."""
    request = compute_pb2.AttachRequest(
        session_id=session_id,
        lease_epoch=lease_epoch,
        session_secret=secret,
        purpose=purpose,
        rank=rank,
        arena_bytes=arena_bytes,
    )
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        answer = ComputeServiceStub(channel).Attach(request, timeout=10)
    return hello(answer.socket_path, answer.ticket)


def block_bytes(seed: int, shape: "torch.Size", dtype: torch.dtype) -> Tensor:
    """What the script writes into a block of one layer."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32)).to(dtype)


def write(memory: Attached, block: int, generation: int, seed: int) -> None:
    """Hold bit, stamp, incarnation, bytes: the order that design and directory ask for."""
    memory.hold_map[block // 8] |= 1 << block % 8
    memory.stamps[block] = generation
    assert memory.directory.header["incarnation"][0] <= stamps.incarnation_of(generation)
    for place in memory.reply.segments:
        blocks = memory.blocks(place.layer, place.role)
        blocks[block] = block_bytes(seed + 2 * place.layer + place.role, blocks[block].shape, blocks.dtype)


def main() -> None:
    address, session_id, lease_epoch, secret, rank = sys.argv[1:]
    memory = attach(address, int(session_id), int(lease_epoch), bytes.fromhex(secret), int(rank))
    print("attached", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        if verb == "write":
            write(memory, *(int(number) for number in numbers))
        elif verb == "drain":
            memory.drained(int(lease_epoch))
        elif verb == "exit":
            break
        print("done", flush=True)


if __name__ == "__main__":
    main()
