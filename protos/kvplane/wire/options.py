"""Channel and server options, set on both ends together.

Deadlines are not here: `timeout` in a service config is broken in grpc's Python client, so the SDK sets one
per call. Retries by service config work and are limited to reads.
"""

import json

from kvplane.wire.limits import MESSAGE_BYTES

Options = list[tuple[str, int | str]]

KEEPALIVE_MS = 60_000
"""How often an idle connection is probed. Tighter pings than the server permits would end it."""

KEEPALIVE_TIMEOUT_MS = 20_000
"""How long an answer to a probe may take."""

_MESSAGE_SIZE: Options = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
]

# grpc waits up to two minutes before it dials a service again that was gone; a restart takes a second.
_RECONNECT: Options = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

_KEEPALIVE: Options = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

# Only calls that change nothing but a lease: everything else is made idempotent by ids and repeated by the SDK itself.
_RETRIED = [
    {"service": "kvplane.v1.CacheService", "method": method}
    for method in ("GetPool", "ListPools", "Explain", "Heartbeat")
]


def server_options() -> Options:
    """Options of every server. A second server on the same port fails to bind instead of sharing it."""
    return [
        *_MESSAGE_SIZE,
        *_KEEPALIVE,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ]


def channel_options() -> Options:
    """Options of every channel."""
    config = {
        "methodConfig": [
            {
                "name": _RETRIED,
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
    return [*_MESSAGE_SIZE, *_KEEPALIVE, *_RECONNECT, ("grpc.service_config", json.dumps(config))]
