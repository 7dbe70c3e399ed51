"""Files that nothing imports say what the code says: metrics, settings, images."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvplane.cache.service.config import CacheConfig
from kvplane.cache.service.metrics import Metrics as CacheMetrics
from kvplane.compute.config import ComputeConfig
from kvplane.compute.metrics import Gauges
from kvplane.compute.metrics import Metrics as ComputeMetrics

ROOT = Path(__file__).parents[2]
COMPOSE = ("docker-compose.yml", "docker-compose.tls.yml")
DOCKERFILES = ("cache_service/Dockerfile", "compute_service/Dockerfile")
METRIC = re.compile(r"\bkvplane_[a-z0-9_]+")


def exported(registry: CollectorRegistry) -> set[str]:
    """Names of all series of a service, also of counters that have counted nothing yet."""
    names = set()
    for family in registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


def all_metrics() -> set[str]:
    """Names of all series of both services."""
    cache, compute = CacheMetrics(), ComputeMetrics()
    cache.refresh([], 0.0)
    compute.watch(lambda: Gauges(0, 0, 0, 0, 0, 0, False))
    return exported(cache.registry) | exported(compute.registry)


def queries() -> dict[str, str]:
    """Every query of the dashboard and the rules."""
    board = json.loads((ROOT / "deploy/grafana/dashboards/kvplane.json").read_text())
    found = {f"{panel['title']}": target["expr"] for panel in board["panels"] for target in panel["targets"]}
    for name in ("recording.yml", "alerts.yml"):
        for group in yaml.safe_load((ROOT / "deploy/prometheus" / name).read_text())["groups"]:
            found |= {rule.get("record") or rule["alert"]: rule["expr"] for rule in group["rules"]}
    return found


def settings(text: str) -> dict[str, str]:
    """Variables of a compose file with their defaults."""
    return dict(re.findall(r"\$\{([A-Z_]+):?-([^}]*)\}", text))


def test_every_metric_that_is_asked_for_is_exported() -> None:
    """A renamed metric must not leave an empty panel, or an alert that cannot fire."""
    known = all_metrics()
    unknown = {name: set(METRIC.findall(query)) - known for name, query in queries().items()}
    assert {name: metrics for name, metrics in unknown.items() if metrics} == {}


def test_every_recorded_series_that_is_asked_for_is_recorded() -> None:
    """The dashboard and the alerts use rules that are there."""
    records = {name for name in queries() if ":" in name}
    asked = {name for query in queries().values() for name in re.findall(r"\bkvplane:[a-z0-9_:]+", query)}
    assert asked <= records


def test_every_metric_is_explained() -> None:
    """docs/operations.md says what to do about each."""
    text = (ROOT / "docs/operations.md").read_text()
    stems = {re.sub(r"_(bucket|count|sum)$", "", name) for name in all_metrics()}
    explained = {f"{prefix}{name}" for name in re.findall(r"[a-z_]+", text) for prefix in ("", "kvplane_compute")}
    assert stems <= explained


def test_every_alert_is_explained() -> None:
    """docs/operations.md has a first look for each."""
    text = (ROOT / "docs/operations.md").read_text()
    assert [name for name in queries() if name.startswith("Kvplane") and f"`{name}`" not in text] == []


def test_the_example_settings_are_the_defaults() -> None:
    """.env.example names every variable of the compose files, with the value that holds without it."""
    defaults: dict[str, str] = {}
    for name in COMPOSE:
        defaults |= settings((ROOT / name).read_text())
    lines = (ROOT / ".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert example.pop("COMPOSE_PROFILES") == "gpu"
    assert example == defaults


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_sets_settings_that_there_are(name: str) -> None:
    """A misspelt one would be ignored."""
    services: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())["services"]
    known = {f"KVPLANE_CACHE_{key.upper()}" for key in CacheConfig.model_fields}
    known |= {f"KVPLANE_COMPUTE_{key.upper()}" for key in ComputeConfig.model_fields}
    given = {
        key for service in services.values() for key in service.get("environment", {}) if key.startswith("KVPLANE")
    }
    assert given
    assert given <= known


def test_compose_keeps_to_what_both_versions_know() -> None:
    """No host namespaces, no privileges, and nothing that compose 1.29 refuses."""
    for name in COMPOSE:
        document = yaml.safe_load((ROOT / name).read_text())
        assert not {"name", "version"} & set(document)
        for service in document["services"].values():
            assert "host" not in (service.get("network_mode"), service.get("pid"), service.get("ipc"))
            assert not service.get("privileged")
            assert "start_interval" not in service.get("healthcheck", {})


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_are_small_pinned_and_run_without_root(name: str) -> None:
    """What a linter of Dockerfiles would look at first."""
    text = (ROOT / name).read_text()
    stages = text.split("\nFROM ")
    assert len(stages) == 3, "a stage that builds, and one that runs"
    assert re.search(r"ARG BASE_IMAGE=\S+:\d+\.\d+\.\d+-", text), "the base image has a full version"
    assert re.findall(r"^USER (.*)$", stages[-1], re.M) == ["10001:10001"]
    assert "\nADD " not in text
    assert "HEALTHCHECK" in stages[-1]
    assert re.search(r'^ENTRYPOINT \["', stages[-1], re.M), "signals reach the service itself"
    for line in re.findall(r"apt-get install.*", text):
        assert "--no-install-recommends" in line
        assert "rm -rf /var/lib/apt/lists" in line


def test_everything_images_install_is_pinned() -> None:
    """Every line of the images' constraints is an exact version."""
    lines = (ROOT / "constraints/images.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9.-]+==\S+|#.*", line) for line in lines)


def test_requirements_of_the_images_are_the_projects(tmp_path: Path) -> None:
    """Extras that name other extras are resolved; a name appears once."""
    script = ROOT / "deploy/image/requirements.py"
    done = subprocess.run(
        ["python3", script, ROOT / "pyproject.toml", "gpu"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    names = [re.split(r"[<>=\[]", line)[0] for line in done.stdout.split()]
    assert {"grpcio", "structlog", "numba", "torch", "cupy-cuda13x", "triton"} <= set(names)
    assert len(names) == len(set(names))
    assert "kvplane" not in names


def test_a_test_authority_signs_what_compose_mounts(tmp_path: Path) -> None:
    """The services' certificate is for the names given, and both are of the authority."""
    subprocess.run([ROOT / "deploy/make-test-ca", tmp_path / "certs", "kv.example", "10.1.2.3"], check=True)
    folder = tmp_path / "certs"
    for name in ("service", "client"):
        subprocess.run(
            ["openssl", "verify", "-CAfile", folder / "ca.pem", folder / f"{name}.pem"], check=True, capture_output=True
        )
    shown = subprocess.run(
        ["openssl", "x509", "-in", folder / "service.pem", "-noout", "-ext", "subjectAltName"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert all(name in shown for name in ("DNS:localhost", "DNS:kv.example", "IP Address:10.1.2.3"))
    assert {each.name for each in folder.iterdir()} == {
        "ca.pem",
        "service.pem",
        "service.key",
        "client.pem",
        "client.key",
    }
