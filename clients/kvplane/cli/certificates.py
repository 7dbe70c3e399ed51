"""How long certificates are good for: those in PEM files, and those that servers show."""

import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from kvplane.cli.connection import TIMEOUT_SECONDS, Connection


@dataclass(frozen=True, slots=True)
class Validity:
    """A certificate's name and when it holds."""

    subject: str
    not_before: datetime
    not_after: datetime

    def problem(self, now: datetime) -> str:
        """Why it does not hold at a time; empty when it does."""
        if now > self.not_after:
            return f"expired on {self.not_after:%Y-%m-%d %H:%M} UTC"
        if now < self.not_before:
            return f"holds from {self.not_before:%Y-%m-%d %H:%M} UTC only"
        return ""


def in_file(path: Path) -> list[Validity]:
    """All certificates of a PEM file. Raises `OSError`, and `ValueError` when there is none in it."""
    return [_validity(each) for each in x509.load_pem_x509_certificates(path.read_bytes())]


def of_server(address: str, connection: Connection) -> Validity:
    """The certificate that a server at host:port shows, whether or not it holds. Raises `OSError`."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    # What is wrong with the certificate is what is asked for: nothing is sent to this server.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if connection.tls_certificate is not None:
        context.load_cert_chain(connection.tls_certificate, connection.tls_key)
    with (
        socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host.strip("[]")) as wrapped,
    ):
        shown = wrapped.getpeercert(binary_form=True)
    if shown is None:
        raise OSError("the server shows no certificate")
    return _validity(x509.load_der_x509_certificate(shown))


def files(connection: Connection) -> Iterator[Path]:
    """The PEM files with certificates that a connection uses."""
    for path in (connection.tls_ca, connection.tls_certificate):
        if path is not None:
            yield path


def now() -> datetime:
    """The time that validity is compared with."""
    return datetime.now(UTC)


def _validity(certificate: x509.Certificate) -> Validity:
    return Validity(
        certificate.subject.rfc4514_string(), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    )
