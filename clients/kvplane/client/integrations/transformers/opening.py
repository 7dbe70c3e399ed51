"""A session on a pool that may not be there yet: services and engines start in any order."""

import time
from typing import Literal

import grpc

from kvplane.client.session import Session
from kvplane.wire.errors import NotFoundError, UnavailableError

_POOL_SECONDS = 0.1
"""How often a pool is asked for that is not there."""


def open_session(
    pool: str,
    mode: Literal["attached", "remote"],
    address: str | None,
    credentials: grpc.ChannelCredentials | None,
    ttl_seconds: float,
    max_sequences: int,
    engine_name: str,
    wait_seconds: float,
) -> Session:
    """See `Session.open`. A pool or a service that is not there is asked for again, for at most `wait_seconds`."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return Session.open(
                pool,
                mode=mode,
                address=address,
                credentials=credentials,
                ttl_seconds=ttl_seconds,
                max_sequences=max_sequences,
                engine_name=engine_name,
            )
        except (NotFoundError, UnavailableError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_POOL_SECONDS)
