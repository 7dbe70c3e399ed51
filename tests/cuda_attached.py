"""An attached engine on a CUDA device, as a script: it opens the pool's memory by its handle and works on it.

    python cuda_attached.py ADDRESS SESSION_ID LEASE_EPOCH SECRET_HEX RANK

It obeys lines on its standard input: `write BLOCK GENERATION SEED`, `sum LAYER ROLE BLOCK`, `event`, `bad-handle`.
"""

import mmap
import os
import socket
import sys

import grpc
import numpy as np
import torch
from torch import Tensor

from compute_attached import block_bytes, receive, send
from kvplane.compute.dtypes import torch_dtype
from kvplane.kernels import DeviceError
from kvplane.kernels.cuda.memory import OpenedMemory
from kvplane.kernels.cuda.runtime import runtime_of
from kvplane.v1 import attach_pb2, compute_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire import stamps
from kvplane.wire.options import channel_options


class Pool:
    """What was attached."""

    def __init__(self, reply: attach_pb2.AttachReply, descriptors: list[int]) -> None:
        self.reply = reply
        self.runtime = runtime_of(0)
        (handle,) = (each for each in reply.handles if each.kind == attach_pb2.MEMORY_KIND_CUDA_IPC)
        self.opened = OpenedMemory(self.runtime, handle.cuda_ipc_handle, handle.num_bytes)

        def shared(index: int) -> mmap.mmap:
            found = reply.handles[index]
            return mmap.mmap(descriptors[found.descriptor_index], found.num_bytes)

        self.stamps = stamps.open_stamps(memoryview(shared(reply.stamps_handle)))
        self.hold_map = stamps.open_hold_map(memoryview(shared(reply.hold_map_handle)))

    def blocks(self, layer: int, role: int) -> Tensor:
        """A tensor of the pool."""
        place = next(each for each in self.reply.segments if (each.layer, each.role) == (layer, role))
        dtype = torch_dtype(place.dtype, "dtype")
        return self.opened.tensor(dtype, list(place.shape), list(place.strides_bytes), place.offset)

    def write(self, block: int, generation: int, seed: int) -> str:
        """Hold bit, stamp, bytes."""
        self.hold_map[block // 8] |= 1 << block % 8
        self.stamps[block] = np.uint64(generation)
        for place in self.reply.segments:
            blocks = self.blocks(place.layer, place.role)
            content = block_bytes(seed + 2 * place.layer + place.role, blocks[block].shape, blocks.dtype)
            blocks[block] = content.to(blocks.device)
        if self.runtime.torch_device.type == "cuda":
            torch.cuda.synchronize()
        return "written"

    def wait(self) -> str:
        """Order our stream behind the service's."""
        event = self.runtime.open_event(self.reply.cuda_ipc_event)
        self.runtime.wait(event)
        self.runtime.destroy_event(event)
        return "waited"

    def open_nonsense(self) -> str:
        """A handle that does not open is a loud failure."""
        try:
            OpenedMemory(self.runtime, b"\1" * 64, 4096)
        except DeviceError as error:
            return str(error)
        return "opened"


def main() -> None:
    address, session_id, lease_epoch, secret, rank = sys.argv[1:]
    request = compute_pb2.AttachRequest(
        session_id=int(session_id),
        lease_epoch=int(lease_epoch),
        session_secret=bytes.fromhex(secret),
        purpose=compute_pb2.ATTACH_PURPOSE_POOL,
        rank=int(rank),
    )
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        answer = ComputeServiceStub(channel).Attach(request, timeout=30)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(answer.socket_path)
    send(connection, attach_pb2.AttachToService(hello=attach_pb2.AttachHello(ticket=answer.ticket)))
    message, descriptors = receive(connection)
    assert not message.reply.status.code, message.reply.status.message
    pool = Pool(message.reply, descriptors)
    print("attached", flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        numbers = [int(word) for word in words]
        if verb == "write":
            print(pool.write(*numbers), flush=True)
        elif verb == "sum":
            layer, role, block = numbers
            print(float(pool.blocks(layer, role)[block].sum()), flush=True)
        elif verb == "event":
            print(pool.wait(), flush=True)
        elif verb == "bad-handle":
            print(pool.open_nonsense(), flush=True)
    pool.opened.close()
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main()
