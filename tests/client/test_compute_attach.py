"""Attaching: what does not open, what is left behind, who may use it."""

import gc
import os
import threading
import warnings
from pathlib import Path

import grpc
import pytest

from compute_access import Engine, Rig
from kvplane.client import ForkedProcessError, Session
from kvplane.client.compute import open_compute
from kvplane.client.compute.attach_socket import attach
from kvplane.client.compute.memory import HANDLE_NOT_OPENED, map_shard
from kvplane.client.compute.topology import Topology
from kvplane.v1 import attach_pb2, compute_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire.errors import (
    IdentityMismatchError,
    PreconditionError,
    StaleEpochError,
    UnsupportedFeatureError,
)
from service_rig import wait_until

TOKENS = list(range(10))


def test_nothing_is_left_behind(pool: Rig) -> None:
    """Descriptors, mappings and threads of a compute access end with it."""

    def counts() -> tuple[int, int, int]:
        folder = str(pool.servers[0].state.identity.folder)
        maps = Path("/proc/self/maps").read_text().splitlines()
        named = sum(thread.name.startswith("kvplane-attached") for thread in threading.enumerate())
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), sum(folder in line for line in maps), named

    with Session.open(address=pool.service.address, max_sequences=8) as session:
        open_compute(session).close()
        gc.collect()
        before = counts()
        engine = Engine(session, open_compute(session), pool.oracle, None)
        sequence = engine.admit(TOKENS)
        engine.forward(sequence)
        opened = engine.compute.plan([sequence], [1], [len(TOKENS)], num_query_heads=8)
        assert counts() > before
        engine.compute.close()
        engine.compute.close()
        gc.collect()
        # Every shard, in this very process, keeps a pidfd, and a hold map with two descriptors.
        wait_until(lambda: counts()[0] <= before[0] + 3 * len(pool.servers), "descriptors are closed")
        assert counts()[1] == before[1] + 1, "the shard's own view of the new hold map, and nothing else"
        assert counts()[2] == 0
        opened.close()
        engine.finish(sequence)


def test_a_child_of_fork_is_refused(pool: Rig) -> None:
    engine = pool.engine()
    sequence = engine.admit(TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            engine.compute.plan([sequence], [1], [len(TOKENS)], num_query_heads=8)
        except ForkedProcessError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    engine.forward(sequence)
    engine.finish(sequence)
    engine.close()


def change_reply(reply: attach_pb2.AttachReply, what: str) -> None:
    """Something that does not open, or is not what it should be."""
    if what == "cuda":
        reply.handles[0].kind = attach_pb2.MEMORY_KIND_CUDA_IPC
    elif what == "kind":
        reply.handles[0].kind = attach_pb2.MEMORY_KIND_UNSPECIFIED
    elif what == "short":
        reply.handles[0].num_bytes += 1 << 30
    elif what == "missing":
        reply.handles[2].descriptor_index = 9
    elif what == "outside":
        reply.segments[0].offset += reply.handles[0].num_bytes
    elif what == "swapped":
        reply.directory_handle, reply.stamps_handle = reply.stamps_handle, reply.directory_handle
    elif what == "layer":
        del reply.segments[:2]
    elif what == "boot":
        reply.boot_id += 1
    elif what == "hole":
        reply.segments[0].segment.first_block = 1


@pytest.mark.parametrize(
    ("what", "error", "reason"),
    [
        ("cuda", PreconditionError, HANDLE_NOT_OPENED),
        ("kind", UnsupportedFeatureError, "UNSUPPORTED_FEATURE"),
        ("short", PreconditionError, HANDLE_NOT_OPENED),
        ("missing", PreconditionError, HANDLE_NOT_OPENED),
        ("outside", PreconditionError, HANDLE_NOT_OPENED),
        ("swapped", PreconditionError, HANDLE_NOT_OPENED),
        ("layer", IdentityMismatchError, "IDENTITY_MISMATCH"),
        ("hole", IdentityMismatchError, "IDENTITY_MISMATCH"),
        ("boot", StaleEpochError, "STALE_EPOCH"),
    ],
)
def test_a_handle_that_does_not_open_is_told(pool: Rig, what: str, error: type[Exception], reason: str) -> None:
    """Typed, with the shard named, and never replaced by something else."""
    with Session.open(address=pool.service.address, max_sequences=8) as session:
        topology = Topology(session.pool)
        shard = topology.shards[1]
        with grpc.insecure_channel(shard.address) as channel:
            attachment = attach(
                ComputeServiceStub(channel),
                session.state,
                shard,
                compute_pb2.ATTACH_PURPOSE_POOL,
                timeout_seconds=10,
            )
        change_reply(attachment.reply, what)
        with pytest.raises(error) as refused:
            map_shard(attachment, session.pool, topology, 1)
        attachment.close()
        assert getattr(refused.value, "reason", "") == reason
        assert getattr(refused.value, "metadata", {})["shard"] == "1"
        assert str(refused.value).startswith(f"shard 1 at {shard.address}")
