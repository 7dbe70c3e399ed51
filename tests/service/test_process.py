"""The cache service as a process: configuration, health, metrics, TLS, start and drain."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import ValidationError

from kvplane.cache.service.config import CONFIG_VARIABLE, CacheConfig, load
from kvplane.client.control import GrpcCacheControl, connect
from kvplane.compute.config import load as load_compute
from kvplane.v1 import cache_pb2, step_pb2
from kvplane.wire import addresses, errors
from service_rig import RunningService, wait_until
from tensorless_shard import TensorlessShard
from wire_engine import A, B, WireEngine, admit, commit, finish, new_sequence, u32, u64

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(channel: grpc.Channel, service: str) -> int:
    """Health status of a service."""
    request = health_pb2.HealthCheckRequest(service=service)
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int(stub.Check(request, timeout=5).status)


def test_the_later_source_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, then environment, then flags."""
    file = tmp_path / "cache.toml"
    file.write_text("max_sessions = 5\nwatermark = 0.1\nlog_level = 'error'\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    monkeypatch.setenv("KVPLANE_CACHE_WATERMARK", "0.2")
    config = load(["--log-level", "debug"])
    assert (config.max_sessions, config.watermark, config.log_level) == (5, 0.2, "debug")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"max_sessions": 0}, "max_sessions"),
        ({"watermark": 1.5}, "watermark"),
        ({"no_such_key": 1}, "no_such_key"),
        ({"listen": ["0.0.0.0:1"]}, "listen"),
        ({"tls_key": "/nowhere"}, "tls_key"),
        ({"tls_key": "/dev/null"}, "tls_certificate"),
        ({"tls_client_ca": "/dev/null"}, "tls_certificate"),
        ({"tenant_secret": "/nowhere"}, "tenant_secret"),
        ({"metrics_address": "nonsense"}, "metrics_address"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], key: str) -> None:
    """Validation says which key."""
    with pytest.raises(ValidationError) as refused:
        CacheConfig(**settings)
    assert key in str(refused.value)


def test_the_same_default_address_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Unix socket in the runtime directory, or what KVPLANE_ADDRESS says: server and client agree."""
    monkeypatch.delenv(addresses.ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/5")
    assert CacheConfig().listen == [addresses.cache_address()] == ["unix:/run/user/5/kvplane/cache.sock"]
    monkeypatch.setenv(addresses.ADDRESS_VARIABLE, "unix:/elsewhere")
    assert CacheConfig().listen == [addresses.cache_address()] == ["unix:/elsewhere"]


def run_service(*flags: str, **environment: str) -> subprocess.Popen[str]:
    """The service as a process of its own."""
    command = [sys.executable, "-m", "kvplane.cache", "--metrics-address", "", "--log-format", "json", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)


def test_sigterm_drains_and_leaves_nothing(tmp_path: Path) -> None:
    """Exit status 0, the socket is gone, logs are JSON lines."""
    socket = tmp_path / "run" / "cache.sock"
    process = run_service("--listen", f"unix:{socket}", "--drain-seconds", "0.2")
    wait_until(socket.exists, "the socket is there", 20)
    wait_until(lambda: socket.stat().st_mode & 0o777 == 0o600, "only its owner may use it")
    with connect(f"unix:{socket}") as channel:
        assert health_of(channel, "") == SERVING
    process.send_signal(signal.SIGTERM)
    _, logs = process.communicate(timeout=20)
    assert process.returncode == 0, logs
    assert not socket.exists()
    assert '"event": "stopped"' in logs.splitlines()[-1]


def test_a_second_service_on_the_same_socket_is_refused(tmp_path: Path) -> None:
    """One clear line; the first goes on. A socket that nobody listens on is taken over."""
    running = RunningService(tmp_path)
    second = run_service("--listen", running.address)
    _, logs = second.communicate(timeout=20)
    assert second.returncode == 1
    assert "another process listens" in logs.splitlines()[-1]
    running.control().list_pools(cache_pb2.ListPoolsRequest())
    running.stop()
    stale = tmp_path / "cache.sock"
    subprocess.run(
        [sys.executable, "-c", f"import socket; socket.socket(socket.AF_UNIX).bind({str(stale)!r})"], check=True
    )
    again = RunningService(tmp_path)
    again.stop()


@pytest.mark.parametrize(
    ("flags", "environment", "line"),
    [
        (["--watermark", "7"], {}, r"watermark: .*less than 1"),
        ([], {"KVPLANE_CACHE_MAX_SESSIONS": "many"}, r"max_sessions: .*integer"),
        ([], {CONFIG_VARIABLE: "/nowhere.toml"}, r"there is no file /nowhere.toml"),
        (["--listen", "unix:/dev/null"], {}, r"/dev/null is there and is no socket"),
    ],
)
def test_a_bad_start_is_one_line_on_stderr(flags: list[str], environment: dict[str, str], line: str) -> None:
    """The key and what is wrong with it; never a traceback."""
    process = run_service(*flags, **environment)
    _, logs = process.communicate(timeout=20)
    assert process.returncode in (1, 2)
    assert re.search(f"kvplane-cache: .*{line}", logs)
    assert "Traceback" not in logs


def test_a_list_in_the_environment_needs_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVPLANE_CACHE_LISTEN is an address, or several with commas."""
    monkeypatch.setenv("KVPLANE_CACHE_LISTEN", "unix:/a,unix:/b")
    assert load([]).listen == ["unix:/a", "unix:/b"]
    monkeypatch.setenv("KVPLANE_COMPUTE_LISTEN", "unix:/c, unix:/d")
    shape = ["--weights-revision", "1", "--tokenizer-revision", "1", "--num-layers", "1", "--num-kv-heads", "1"]
    assert load_compute([*shape, "--head-dim", "64"]).listen == ["unix:/c", "unix:/d"]


def test_health_says_when_a_pool_is_open(service: Callable[..., Any]) -> None:
    """Shards can dial in from the start; engines are served once a pool is open; nobody while draining."""
    running, _ = service(num_shards=0)
    with connect(running.address) as channel:
        assert health_of(channel, "kvplane.v1.PoolRegistryService") == SERVING
        assert health_of(channel, "kvplane.v1.CacheService") == NOT_SERVING
        shard = TensorlessShard(running.address).start()
        wait_until(lambda: health_of(channel, "kvplane.v1.CacheService") == SERVING, "the pool is open")
        running.on_loop(lambda: running.server.plane.drain(1.0))
        wait_until(lambda: health_of(channel, "") == NOT_SERVING, "it drains")
        shard.stop()


def test_reflection_lists_the_services(service: Callable[..., Any]) -> None:
    """A generic client finds the contract."""
    running, _ = service(num_shards=0)
    with connect(running.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (response,) = stub.ServerReflectionInfo(iter([request]), timeout=5)
    names = {each.name for each in response.list_services_response.service}
    assert {"kvplane.v1.CacheService", "kvplane.v1.PoolRegistryService", "grpc.health.v1.Health"} <= names


def scrape(running: RunningService) -> dict[str, float]:
    """Samples of the Prometheus endpoint, by name with labels."""
    plane = running.server.plane
    running.on_loop(lambda: plane.metrics.refresh(plane.pools.values(), plane.clock()))
    with urllib.request.urlopen(f"http://127.0.0.1:{running.server.metrics_port}/metrics", timeout=5) as page:
        lines = [line for line in page.read().decode().splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_metrics_add_up(service: Callable[..., Any]) -> None:
    """Blocks by state sum to the pool; hits, seals, steps by part, rejections and sequences are counted."""
    running, _ = service()
    engine = WireEngine(running.control())
    engine.step(admit=admit(new_sequence(A, range(40))))
    engine.step(commit=commit((A, 40)))
    engine.settle()
    other = WireEngine(running.control())
    other.step(admit=admit(new_sequence(A, range(40))))
    samples = scrape(running)
    states = {name: value for name, value in samples.items() if name.startswith("kvplane_blocks{")}
    assert sum(states.values()) == samples['kvplane_pool_blocks{pool="default"}'] == 63
    assert samples['kvplane_blocks_unaccounted{pool="default"}'] == 0
    assert samples['kvplane_blocks{pool="default",state="held"}'] == 4
    assert samples['kvplane_hit_tokens_total{pool="default"}'] == 32
    assert samples['kvplane_query_tokens_total{pool="default"}'] == 80
    assert samples["kvplane_sealed_blocks_total"] == 2
    assert samples['kvplane_sessions{pool="default"}'] == 2
    assert samples['kvplane_sequences{pool="default",state="running"}'] == 2
    steps = engine.step_id + other.step_id
    for part in ("decode", "core", "encode"):
        assert samples[f'kvplane_step_seconds_count{{part="{part}"}}'] == steps


def test_ages_of_what_waits(service: Callable[..., Any]) -> None:
    """How long the oldest sequence waits or is stalled, and how long device work keeps references."""
    running, _ = service(num_blocks=8)
    engine = WireEngine(running.control())
    engine.step(admit=admit(new_sequence(A, range(80))))
    engine.step(admit=admit(new_sequence(B, range(500, 580))))
    engine.step(extend=step_pb2.Extend(sequence_ids=u64([A]), num_slots=u32([16 * 8])))
    samples = scrape(running)
    assert samples['kvplane_sequences{pool="default",state="waiting"}'] == 1
    assert samples['kvplane_sequences{pool="default",state="stalled"}'] == 1
    time.sleep(0.3)
    samples = scrape(running)
    for what in ("waiting", "stalled"):
        assert 0.2 < samples[f'kvplane_oldest_seconds{{pool="default",what="{what}"}}'] < 10
    engine.step(finish=finish(A, B))
    samples = scrape(running)
    assert samples['kvplane_sequences{pool="default",state="stalled"}'] == 0
    for what in ("waiting", "stalled"):
        assert samples[f'kvplane_oldest_seconds{{pool="default",what="{what}"}}'] == 0


def certificates(folder: Path) -> None:
    """A test authority with a server's and a client's certificate."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    (folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *new[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ["x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
        openssl(*signed, "-days", "2", "-out", f"{name}.pem", "-extfile", "san")


def test_tcp_asks_for_a_certificate(tmp_path: Path) -> None:
    """Mutual TLS: a client of the authority is served, one without a certificate is not."""
    certificates(tmp_path)
    running = RunningService(
        tmp_path,
        listen=["127.0.0.1:0"],
        tls_certificate=tmp_path / "server.pem",
        tls_key=tmp_path / "server.key",
        tls_client_ca=tmp_path / "ca.pem",
    )
    authority = (tmp_path / "ca.pem").read_bytes()
    pair = ((tmp_path / "client.key").read_bytes(), (tmp_path / "client.pem").read_bytes())
    known, unknown = grpc.ssl_channel_credentials(authority, *pair), grpc.ssl_channel_credentials(authority)
    with connect(running.address, known) as channel:
        assert not GrpcCacheControl(channel).list_pools(cache_pb2.ListPoolsRequest()).pools
    with connect(running.address, unknown) as channel, pytest.raises(errors.UnavailableError):
        GrpcCacheControl(channel, timeout_seconds=3).list_pools(cache_pb2.ListPoolsRequest())
    running.stop()


def test_the_check_says_whether_a_service_is_up_and_a_pool_open(tmp_path: Path) -> None:
    """What the health check of a container runs: exit status 1 before the service, before the pool, and after both."""

    def check(*arguments: str) -> int:
        command = [sys.executable, "-m", "kvplane.cache", *arguments]
        return subprocess.run(command, env=dict(os.environ) | environment, capture_output=True, timeout=60).returncode

    environment = {"KVPLANE_CACHE_LISTEN": f"0.0.0.0:1,unix:{tmp_path / 'cache.sock'}", "KVPLANE_CACHE_INSECURE": "1"}
    assert check("--check") == 1
    service = RunningService(tmp_path)
    try:
        assert (check("--check"), check("--check-pool")) == (0, 1)
        shard = TensorlessShard(service.address, num_blocks=16).start()
        try:
            # Health follows the pool's state with the service's next tick.
            wait_until(lambda: check("--check-pool") == 0, "the check says that a pool is open")
        finally:
            shard.stop()
    finally:
        service.stop()
    assert (check("--check"), check("--check", "--no-such-flag")) == (1, 2)
