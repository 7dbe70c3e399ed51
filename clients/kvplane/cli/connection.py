"""How the command reaches the services."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvplane.client.control import GrpcCacheControl, connect
from kvplane.wire.addresses import socket_path
from kvplane.wire.errors import InvalidArgumentError, KvplaneError, UnavailableError

START_HINT = (
    "start both services with `kvplane up`, or one with `kvplane cache`; KVPLANE_ADDRESS or --address says where"
)

TIMEOUT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Connection:
    """An address, and what TLS needs there."""

    address: str
    """gRPC address of the cache service."""
    tls_ca: Path | None = None
    """PEM authorities that the services' certificates come from; None: no TLS."""
    tls_certificate: Path | None = None
    """PEM certificate that is shown to the services."""
    tls_key: Path | None = None

    def check(self) -> None:
        """Raises `InvalidArgumentError` for options that do not fit together."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidArgumentError.of("tls_certificate", "--tls-certificate and --tls-key belong together")
        if self.tls_certificate is not None and self.tls_ca is None:
            raise InvalidArgumentError.of("tls_ca", "--tls-certificate needs --tls-ca")

    def channel(self, address: str | None = None) -> grpc.Channel:
        """A channel to the cache service, or to a compute service at `address`. TLS is for TCP alone."""
        target = address or self.address
        if self.tls_ca is None or socket_path(target) is not None:
            return connect(target)
        key = self.tls_key.read_bytes() if self.tls_key else None
        certificate = self.tls_certificate.read_bytes() if self.tls_certificate else None
        return connect(target, grpc.ssl_channel_credentials(self.tls_ca.read_bytes(), key, certificate))

    def control(self, channel: grpc.Channel) -> GrpcCacheControl:
        """The cache service's calls, with a short deadline."""
        return GrpcCacheControl(channel, TIMEOUT_SECONDS)


def away(connection: Connection, error: KvplaneError) -> KvplaneError:
    """The error of a call to the cache service, with the address and a hint when nobody answered."""
    if not isinstance(error, UnavailableError):
        return error
    return UnavailableError(
        f"no cache service at {connection.address}: {reason(error)}", metadata={**error.metadata, "hint": START_HINT}
    )


def reason(error: KvplaneError) -> str:
    """Why nobody answered, without gRPC's own prefixes."""
    text = " ".join(error.message.split())
    for known in ("No such file or directory", "Connection refused", "Permission denied", "CERTIFICATE_VERIFY_FAILED"):
        if known in text:
            return (
                known
                if known != "CERTIFICATE_VERIFY_FAILED"
                else "its certificate is not from --tls-ca, or has expired"
            )
    return text


def health_stub(channel: grpc.Channel) -> Any:
    """The health service's calls, untyped in grpc's own package."""
    from grpc_health.v1 import health_pb2_grpc

    return health_pb2_grpc.HealthStub(channel)
