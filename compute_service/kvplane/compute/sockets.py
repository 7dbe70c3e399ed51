"""Where a compute service listens and how it dials: Unix sockets, TCP with TLS, and nothing in between."""

import os
import socket
from contextlib import closing

import grpc

from kvplane.compute.config import ComputeConfig
from kvplane.wire.addresses import socket_path
from kvplane.wire.options import channel_options


def bind(server: grpc.aio.Server, address: str, config: ComputeConfig) -> str:
    """Add an address to a server and return it with the port that was chosen. Raises `RuntimeError` that names it."""
    path = socket_path(address)
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_stale(address)
        server.add_insecure_port(address)
        return address
    try:
        if config.tls_certificate is None or config.tls_key is None:
            port = server.add_insecure_port(address)
        else:
            authorities = config.tls_client_ca.read_bytes() if config.tls_client_ca else None
            pair = (config.tls_key.read_bytes(), config.tls_certificate.read_bytes())
            required = authorities is not None
            credentials = grpc.ssl_server_credentials([pair], authorities, require_client_auth=required)
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise RuntimeError(f"listen: cannot bind {address}: {error}") from error
    return f"{address.rpartition(':')[0]}:{port}"


def cache_channel(config: ComputeConfig) -> grpc.aio.Channel:
    """A new channel to the cache service."""
    if config.cache_tls_ca is None:
        return grpc.aio.insecure_channel(config.cache, options=channel_options())
    key = config.tls_key.read_bytes() if config.tls_key else None
    certificate = config.tls_certificate.read_bytes() if config.tls_certificate else None
    credentials = grpc.ssl_channel_credentials(config.cache_tls_ca.read_bytes(), key, certificate)
    return grpc.aio.secure_channel(config.cache, credentials, options=channel_options())


def own_channel(config: ComputeConfig) -> grpc.Channel:
    """A channel to the first address that a service with this configuration listens on. With TLS it shows the service's
    own certificate and trusts that and the clients' authorities. Raises `OSError` when a PEM file cannot be read."""
    address = config.listen[0]
    if socket_path(address) is not None or config.tls_certificate is None or config.tls_key is None:
        return grpc.insecure_channel(address, options=channel_options())
    certificate = config.tls_certificate.read_bytes()
    authorities = config.tls_client_ca.read_bytes() if config.tls_client_ca else b""
    credentials = grpc.ssl_channel_credentials(
        certificate + b"\n" + authorities, config.tls_key.read_bytes(), certificate
    )
    options = list(channel_options())
    if config.advertise and socket_path(config.advertise) is None:
        # The certificate is for the name that engines are told, which an address to bind need not be.
        options.append(("grpc.ssl_target_name_override", config.advertise.rpartition(":")[0]))
    return grpc.secure_channel(address, credentials, options=options)


def make_private(address: str) -> None:
    """A Unix socket is for its user alone."""
    path = socket_path(address)
    if path is not None:
        path.chmod(0o600)


def unlink(address: str) -> None:
    """Remove a Unix socket's name."""
    path = socket_path(address)
    if path is not None:
        path.unlink(missing_ok=True)


def _remove_stale(address: str) -> None:
    """Remove a socket that nobody listens on. Raises `RuntimeError` when somebody does."""
    path = socket_path(address)
    if path is None or not path.exists():
        return
    with closing(socket.socket(socket.AF_UNIX)) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise RuntimeError(f"listen: another process listens on {address}")
