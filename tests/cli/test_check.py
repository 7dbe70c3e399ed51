"""`kvplane check`: a healthy pair is healthy, and every fault is named with what to do."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cli_rig import MODEL, Kvplane, Pair
from compute_engine import running, settings
from service_rig import RunningService, wait_until
from tensorless_shard import TensorlessShard

CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "dtype": "bfloat16",
}
"""The model of the pair."""


def test_a_healthy_pair(kvplane: Kvplane, pair: Pair, tmp_path: Path) -> None:
    """Every line is good, and the exit status 0."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected = (
        "--weights-revision",
        "w1",
        "--tokenizer-revision",
        "t1",
        "--kv-dtype",
        "bfloat16",
        "--block-tokens",
        16,
    )
    ran = kvplane("check", "--address", pair.address, "--model", tmp_path, "--memory-folder", tmp_path, *expected)
    assert ran.status == 0
    assert [line[0] for line in ran.out.splitlines()] == ["✓"] * 8
    assert "READY, 63 blocks" in ran.finding("pool default")
    assert f"serves at {pair.compute.addresses[0]}" in ran.finding("pool default shard 0")
    assert f"process {os.getpid()} uses " in ran.finding("cache service open files")
    assert "weights_revision, tokenizer_revision, kv_dtype, block_tokens, num_layers" in ran.finding(
        "pool default model"
    )


def test_no_cache_service(kvplane: Kvplane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is named, from the environment too, and how to start one."""
    monkeypatch.setenv("KVPLANE_ADDRESS", f"unix:{tmp_path}/none.sock")
    ran = kvplane("check")
    assert ran.status == 1
    assert f"no cache service at unix:{tmp_path}/none.sock: No such file or directory" in ran.finding("cache service")
    assert "kvplane up" in ran.finding("cache service")
    ran = kvplane("top", "--once")
    assert ran.status == 1
    assert ran.err.startswith(
        f"kvplane: no cache service at unix:{tmp_path}/none.sock: No such file or directory\nhint: "
    )
    ran = kvplane("check", "--address", "127.0.0.1:1")
    assert "Connection refused" in ran.finding("cache service")


def test_no_compute_service(kvplane: Kvplane, tmp_path: Path) -> None:
    """None has ever registered; one that was there is gone; one pool of another name."""
    cache = RunningService(tmp_path)
    ran = kvplane("check", "--address", cache.address)
    assert ran.status == 1
    assert "no compute service has registered for any pool" in ran.finding("compute service")
    assert f"kvplane compute --cache {cache.address}" in ran.finding("compute service")
    with running(settings(tmp_path, **MODEL)):
        cache.wait_ready()
        ran = kvplane("check", "--address", cache.address, "--pool-id", "other")
        assert "has registered for pool other" in ran.finding("compute service")
    ran = kvplane("check", "--address", cache.address)
    assert ran.status == 1
    assert ran.finding("pool default shards").startswith("✗ pool default shards: no compute service is connected")
    assert "RECONCILING" in ran.finding("pool default")
    cache.stop()


def test_one_shard_of_two(kvplane: Kvplane, tmp_path: Path) -> None:
    """The missing rank is named; so is an address that cannot be reached."""
    cache = RunningService(tmp_path)
    shard = TensorlessShard(cache.address, rank=0, world_size=2).start()
    ran = kvplane("check", "--address", cache.address)
    assert "rank 1 of 2 not connected" in ran.finding("pool default shards")
    assert "it opens when all its compute services are connected" in ran.finding("pool default")
    assert "no compute service at unix:/nowhere" in ran.finding("pool default shard 0")
    shard.stop()
    cache.stop()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--weights-revision", "w2"], "weights_revision is w1, expected w2"),
        (["--tokenizer-revision", "t2"], "tokenizer_revision is t1, expected t2"),
        (["--kv-dtype", "float16"], "kv_dtype is bfloat16, expected float16"),
        (["--block-tokens", "32"], "block_tokens is 16, expected 32"),
        ({"num_hidden_layers": 3}, "num_layers is 2, expected 3"),
        ({"num_key_value_heads": 4}, "num_kv_heads is 2, expected 4"),
        ({"head_dim": 32}, "head_dim is 16, expected 32"),
        ({"sliding_window": 8}, "window_tokens is none, expected 8"),
    ],
)
def test_another_model(
    kvplane: Kvplane, pair: Pair, tmp_path: Path, options: list[str] | dict[str, int], named: str
) -> None:
    """The field that differs, alone, with both values."""
    if isinstance(options, dict):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | options))
        options = ["--model", str(tmp_path)]
    ran = kvplane("check", "--address", pair.address, *options)
    assert ran.status == 1
    line, hint = ran.finding("pool default model").splitlines()
    assert line == f"✗ pool default model: wrong model identity: {named}"
    assert "--pool-id" in hint
    assert ran.out.count("✗") == 1


def test_too_little_shared_memory(kvplane: Kvplane, pair: Pair, tmp_path: Path) -> None:
    """More is needed than the file system has; the folder need not be there yet."""
    ran = kvplane("check", "--address", pair.address, "--need", "1000TiB", "--memory-folder", tmp_path / "a" / "b")
    assert ran.status == 1
    assert f"{tmp_path} has too little room" in ran.finding("shared memory")
    assert "1000 TiB needed" in ran.finding("shared memory")
    assert kvplane("check", "--need", "much").status == 2


def test_full_shared_memory(tmp_path: Path) -> None:
    """A full tmpfs in place of /dev/shm, in a mount namespace of the test's own."""
    check = f"{sys.executable} -m kvplane.cli check --address unix:{tmp_path}/none.sock"
    script = (
        "mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm || exit 77;"
        f"{check}; head -c 2m /dev/zero > /dev/shm/left-behind; {check}"
    )
    private = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    assert shutil.which("unshare"), "util-linux is part of every distribution"
    ran = subprocess.run([*private, "sh", "-c", script], capture_output=True, text=True)
    if ran.returncode == 77 or not ran.stdout:
        pytest.skip(f"no mount namespaces here: {ran.stderr.strip()}")
    before, after = (line for line in ran.stdout.splitlines() if "shared memory: " in line)
    assert "/dev/shm has too little room: 1 MiB of 1 MiB left" in before
    assert "/dev/shm is full: 0 B of 1 MiB left, 64 MiB needed" in after


def test_a_pool_that_cannot_be_created(kvplane: Kvplane, tmp_path: Path) -> None:
    """All shards are there, and still it does not open."""
    cache = RunningService(tmp_path)
    shard = TensorlessShard(cache.address)
    shard.fails = {"create_pool"}
    shard.start()
    ran = kvplane("check", "--address", cache.address)
    assert "1 of 1 connected" in ran.finding("pool default shards")
    assert "RECONCILING" in ran.finding("pool default")
    assert "or could not be: see shared memory above" in ran.finding("pool default")
    shard.stop()
    cache.stop()


class Authority:
    """A test authority that signs certificates for any span of time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = self.sign("authority", -1, 30, self._key)

    def sign(self, name: str, first_day: float, last_day: float, key: ec.EllipticCurvePrivateKey | None = None) -> Path:
        """NAME.pem and NAME.key, valid between two days counted from now."""
        own = key or ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
            .public_key(own.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=first_day))
            .not_valid_after(now + timedelta(days=last_day))
            .add_extension(x509.BasicConstraints(ca=key is not None, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        path = self._folder / f"{name}.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private = own.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.with_suffix(".key").write_bytes(private)
        return path


@contextmanager
def tls_cache(folder: Path, authority: Authority, certificate: Path) -> Iterator[RunningService]:
    """A cache service on TCP with mutual TLS."""
    cache = RunningService(
        folder,
        listen=["127.0.0.1:0"],
        tls_certificate=certificate,
        tls_key=certificate.with_suffix(".key"),
        tls_client_ca=authority.path,
    )
    yield cache
    cache.stop()


def test_certificates(kvplane: Kvplane, tmp_path: Path) -> None:
    """Over TLS: good ones hold; an expired one of the client's, of the server's, one from tomorrow on are named."""
    authority = Authority(tmp_path)
    client, old = authority.sign("client", -1, 5), authority.sign("old", -9, -2)

    def options(certificate: Path) -> list[object]:
        return [
            "--tls-ca",
            authority.path,
            "--tls-certificate",
            certificate,
            "--tls-key",
            certificate.with_suffix(".key"),
        ]

    with tls_cache(tmp_path, authority, authority.sign("server", -1, 100)) as cache:
        ran = kvplane("check", "--address", cache.address, *options(client))
        assert ran.finding("cache service").startswith("✓")
        lines = [line for line in ran.out.splitlines() if "certificate: " in line]
        assert [line[0] for line in lines] == ["✓"] * 3
        assert "client.pem (CN=client) holds for 4 more days: renew it soon" in lines[1]
        assert f"of the cache service at {cache.address} (CN=server) holds for 99 more days" in lines[2]
        ran = kvplane("check", "--address", cache.address, *options(old))
        assert ran.status == 1
        day = datetime.now(UTC) - timedelta(days=2)
        assert f"✗ certificate: {old} (CN=old) expired on {day:%Y-%m-%d}" in ran.out
        assert "renew it" in ran.out
        assert ran.finding("cache service").startswith("✗")
    with tls_cache(tmp_path, authority, authority.sign("server", -9, -2)) as cache:
        ran = kvplane("check", "--address", cache.address, *options(client))
        assert ran.status == 1
        assert f"✗ certificate: of the cache service at {cache.address} (CN=server) expired on " in ran.out
        assert ran.finding("cache service").startswith("✗ cache service: no cache service at")
    ran = kvplane("check", "--address", "127.0.0.1:1", *options(authority.sign("early", 1, 9)))
    assert "(CN=early) holds from " in ran.out
    ran = kvplane("check", "--address", "127.0.0.1:1", "--tls-ca", tmp_path / "missing.pem")
    assert f"✗ certificate: {tmp_path}/missing.pem: No such file or directory" in ran.out
    assert kvplane("check", "--tls-key", client).status == 2


def test_too_few_descriptors(kvplane: Kvplane, pair: Pair) -> None:
    """The limit of the process behind the socket, which is this one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        ran = kvplane("check", "--address", pair.address)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ran.status == 1
    assert "of 512, too few" in ran.finding("cache service open files")
    assert "ulimit -n" in ran.finding("cache service open files")


def test_two_control_planes(kvplane: Kvplane, tmp_path: Path) -> None:
    """A compute service that follows another cache service than the one that names it."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    first, second = (RunningService(folder) for folder in folders)
    with running(settings(folders[0], **MODEL)) as compute:
        first.wait_ready()
        shard = TensorlessShard(second.address).start()
        second.wait_ready()
        # The second cache service is told the first one's compute service.
        second.on_loop(
            lambda: setattr(second.server.plane.pools["default"].links[0].register, "address", compute.addresses[0])
        )
        ran = kvplane("check", "--address", second.address)
        assert ran.status == 1
        assert f"boot_id is {compute.state.identity.boot_id} there" in ran.finding("pool default shard 0")
        assert "two cache services" in ran.finding("pool default shard 0")
        shard.stop()
    second.stop()
    first.stop()


def test_a_draining_service(kvplane: Kvplane, tmp_path: Path) -> None:
    """It answers, and says that it ends."""
    cache = RunningService(tmp_path)
    cache.on_loop(lambda: cache.server.plane.drain(5.0))
    wait_until(lambda: "is draining" in kvplane("check", "--address", cache.address).out, "the health service says so")
    cache.stop()
