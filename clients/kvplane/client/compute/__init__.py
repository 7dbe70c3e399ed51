"""Compute access: attention over the blocks of a session, on memory that is mapped or through the compute services.

    with open_compute(session) as compute:
        with compute.plan(ids, query_lengths, kv_lengths, num_query_heads=9) as plan:
            out = plan.run(layer, query, key, value)

Which way it is follows from the session's mode; the calls are the same. Imports torch and `kvplane.kernels` (extra
`[compute]`); `kvplane.client` alone does not.
"""

import grpc

from kvplane.client.compute.attached import AttachedCompute
from kvplane.client.compute.interface import Compute, ComputePlan, HasState, Transport
from kvplane.client.compute.remote import RemoteCompute
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.interface import DEFAULT_TIMEOUT_SECONDS

__all__ = ["AttachedCompute", "Compute", "ComputePlan", "RemoteCompute", "Transport", "open_compute"]


def open_compute(
    session: HasState,
    transport: Transport = "auto",
    *,
    credentials: grpc.ChannelCredentials | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    rank: int = 0,
    device_index: int = 0,
) -> Compute:
    """The way to the bytes of a session's pool: attached or remote, as the session is. Close it before the session; a
    session has one at a time.

    `transport` is for remote sessions: `shm` shares memory with shards on this host, `inline` sends tensors in
    messages, `auto` tries the first once; `Compute.transport` says which it is. `credentials` are those of the shards'
    channels, `timeout_seconds` is the deadline of every wait for a shard, `rank` is this process's in its session,
    `device_index` the CUDA device of the pool as this process counts them.
    Raises `InvalidArgumentError`, `PreconditionError` (reasons `OTHER_HOST`, `HANDLE_NOT_OPENED`, …),
    `UnavailableError`, with the shard named: attached memory that does not open is never replaced by something slower.
    """
    state = session.state
    state.check_usable()
    if transport not in ("auto", "shm", "inline"):
        raise InvalidArgumentError.of("transport", f"auto, shm or inline expected, got {transport!r}")
    if state.mode == "remote":
        return RemoteCompute(state, transport=transport, credentials=credentials, timeout_seconds=timeout_seconds)
    if transport == "inline":
        raise InvalidArgumentError.of("transport", "an attached session maps the pool; inline is for remote ones")
    return AttachedCompute(
        state, credentials=credentials, timeout_seconds=timeout_seconds, rank=rank, device_index=device_index
    )
