"""`kvplane-cache --check`: asks a running service whether it is healthy, as its configuration says where it is."""

import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane.cache.service.config import CacheConfig
from kvplane.wire.addresses import socket_path
from kvplane.wire.options import channel_options

CHECK_SECONDS = 2.0
POOLS = "kvplane.v1.CacheService"
"""Health service name that serves while a pool is open."""

_ANY_HOST = ("0.0.0.0", "[::]", "")


def check(config: CacheConfig, service: str = "") -> int:
    """0 when the service serves (or, with a name, that part of it), else 1 with the reason on stderr."""
    address = address_of(config)
    try:
        with _channel(config, address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CHECK_SECONDS)
    except (grpc.RpcError, OSError) as error:
        print(f"{address}: {error}", file=sys.stderr)
        return 1
    return int(answer.status != health_pb2.HealthCheckResponse.SERVING)


def address_of(config: CacheConfig) -> str:
    """Where to ask: the first Unix socket, which needs no certificate, else the first address as this host sees it."""
    for address in config.listen:
        if socket_path(address) is not None:
            return address
    host, _, port = config.listen[0].rpartition(":")
    return f"localhost:{port}" if host in _ANY_HOST else config.listen[0]


def _channel(config: CacheConfig, address: str) -> grpc.Channel:
    """With TLS it shows the service's own certificate and trusts that and the clients' authorities; the certificate has
    to be for the name that is dialled. Raises `OSError` when a PEM file cannot be read."""
    if socket_path(address) is not None or config.tls_certificate is None or config.tls_key is None:
        return grpc.insecure_channel(address, options=channel_options())
    certificate = config.tls_certificate.read_bytes()
    authorities = config.tls_client_ca.read_bytes() if config.tls_client_ca else b""
    trusted = certificate + b"\n" + authorities
    credentials = grpc.ssl_channel_credentials(trusted, config.tls_key.read_bytes(), certificate)
    return grpc.secure_channel(address, credentials, options=channel_options())
