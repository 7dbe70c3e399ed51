"""Mutual TLS on both ways in and on the way out."""

import subprocess
from pathlib import Path

import grpc
import pytest

from compute_engine import flags, running, settings
from kvplane.compute.__main__ import main
from kvplane.v1 import compute_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire.options import channel_options
from service_rig import RunningService

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def certificates(folder: Path) -> None:
    """An authority, a key and a certificate for both services, and one for a client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", *NEW_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("service", "client"):
        openssl("req", *NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", *signer, "-out", f"{name}.pem")


def test_both_services_ask_for_certificates(tmp_path: Path) -> None:
    """A shard registers with its certificate; an engine is served with one and turned away without."""
    certificates(tmp_path)
    tls = {
        "listen": ["127.0.0.1:0"],
        "tls_certificate": tmp_path / "service.pem",
        "tls_key": tmp_path / "service.key",
        "tls_client_ca": tmp_path / "ca.pem",
    }
    authority = (tmp_path / "ca.pem").read_bytes()
    pair = ((tmp_path / "client.key").read_bytes(), (tmp_path / "client.pem").read_bytes())
    cache = RunningService(tmp_path, **tls)
    values = settings(tmp_path, cache=cache.address, cache_tls_ca=tmp_path / "ca.pem") | tls
    with running(values) as shard:
        cache.wait_ready()
        known, unknown = grpc.ssl_channel_credentials(authority, *pair), grpc.ssl_channel_credentials(authority)
        with grpc.secure_channel(shard.addresses[0], known, options=channel_options()) as channel:
            answer = ComputeServiceStub(channel).GetShard(compute_pb2.GetShardRequest(), timeout=5)
            assert answer.control_plane_connected
        with grpc.secure_channel(shard.addresses[0], unknown, options=channel_options()) as channel:
            stub = ComputeServiceStub(channel)
            with pytest.raises(grpc.RpcError):
                stub.GetShard(compute_pb2.GetShardRequest(), timeout=3)
    cache.stop()


def test_a_health_check_over_tls(tmp_path: Path) -> None:
    """The service's own check shows the service's certificate."""
    certificates(tmp_path)
    values = settings(tmp_path) | {
        "listen": ["127.0.0.1:0"],
        "tls_certificate": tmp_path / "service.pem",
        "tls_key": tmp_path / "service.key",
        "tls_client_ca": tmp_path / "ca.pem",
    }
    with running(values) as shard:
        address = shard.addresses[0]
        assert main(["--check", *flags(values | {"listen": [address]})]) == 0
        assert main(["--check", *flags(values | {"listen": [address], "advertise": "localhost:1"})]) == 0
        missing = values | {"listen": [address], "tls_key": tmp_path / "missing"}
        assert main(["--check", *flags(missing)]) == 1
