"""Requests that begin and end a session, the same for the sync and the asyncio client."""

import os
import socket

import numpy as np

from kvplane.client.draft import Integers
from kvplane.client.state import MODES, SessionState
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.packed import pack_u32

RETRY_SECONDS = 0.1
"""Pause before a call is repeated that named none."""


def open_request(
    pool_id: str,
    mode: str,
    model: types_pb2.ModelIdentity,
    *,
    layout: types_pb2.LayoutIdentity | None = None,
    namespace: cache_pb2.NamespaceSpec | None = None,
    ttl_seconds: float,
    num_ranks: int,
    max_sequences: int,
    engine_name: str | None,
) -> cache_pb2.OpenSessionRequest:
    """A request for a new session. Raises `InvalidArgumentError` for an unknown mode."""
    if mode not in MODES:
        raise InvalidArgumentError.of("mode", f"must be one of {sorted(MODES)}, got {mode!r}")
    return cache_pb2.OpenSessionRequest(
        pool_id=pool_id,
        model=model,
        mode=MODES[mode],
        layout=layout,
        default_namespace=namespace,
        ttl_ms=round(1000 * ttl_seconds),
        num_ranks=num_ranks,
        max_sequences=max_sequences,
        engine_name=engine_name or f"{os.getpid()}@{socket.gethostname()}",
    )


def close_request(state: SessionState) -> cache_pb2.CloseSessionRequest:
    """A request to end a session; says whether nothing of it runs on the device any more."""
    drained = state.work.open_plans == 0 and state.completed_step >= state.last_step
    return cache_pb2.CloseSessionRequest(session_id=state.session_id, lease_epoch=state.lease_epoch, drained=drained)


def heartbeat_request(state: SessionState) -> cache_pb2.HeartbeatRequest:
    """A request to renew a lease."""
    return cache_pb2.HeartbeatRequest(session_id=state.session_id, lease_epoch=state.lease_epoch)


def lookup_request(
    state: SessionState, tokens: Integers, namespace_id: int, max_hit_tokens: int | None
) -> cache_pb2.LookupRequest:
    """A request how much of a prompt is published."""
    request = cache_pb2.LookupRequest(session_id=state.session_id, lease_epoch=state.lease_epoch)
    request.prompt.tokens = pack_u32(np.atleast_1d(np.asarray(tokens)))
    request.prompt.namespace_id = namespace_id
    if max_hit_tokens is not None:
        request.max_hit_tokens = max_hit_tokens
    return request


def namespace_request(
    state: SessionState, adapter_id: str, adapter_revision: str, sub_salt: bytes
) -> cache_pb2.RegisterNamespaceRequest:
    """A request to name a namespace."""
    return cache_pb2.RegisterNamespaceRequest(
        session_id=state.session_id,
        lease_epoch=state.lease_epoch,
        namespace=cache_pb2.NamespaceSpec(adapter_id=adapter_id, adapter_revision=adapter_revision, sub_salt=sub_salt),
    )
