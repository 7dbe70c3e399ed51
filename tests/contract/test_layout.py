"""The layout that keeps wheel, editable install and type checkers in agreement."""

import os
import subprocess
import sys
from pathlib import Path

import kvplane

ROOT = Path(__file__).parents[2]
SOURCES = ("protos", "cache_service", "compute_service", "kernels", "clients")


def test_no_portion_claims_the_namespace() -> None:
    """An `__init__.py` in one `*/kvplane/` would hide all other portions."""
    assert not list(ROOT.glob("*/kvplane/__init__.py"))


def test_make_test_runs_on_the_wheel() -> None:
    """Under `make test` every portion comes from the installed wheel."""
    if os.environ.get("KVPLANE_EXPECT_WHEEL"):
        assert all("site-packages" in path for path in kvplane.__path__)


def test_every_package_is_typed() -> None:
    """Each portion carries its own py.typed."""
    portions = [path for source in SOURCES for path in (ROOT / source / "kvplane").iterdir() if path.is_dir()]
    portions = [path for path in portions if path.name != "__pycache__"]
    assert len(portions) >= 7
    assert [path for path in portions if not (path / "py.typed").exists()] == []


def test_the_client_imports_nothing_heavy() -> None:
    """An engine that imports the SDK gets no torch, no numba, no logger of ours, though all are installed here."""
    heavy = ("torch", "cupy", "triton", "numba", "structlog", "prometheus_client", "transformers")
    probe = (
        "import sys, importlib.util, kvplane.client, kvplane.wire.directory, kvplane.wire.status, kvplane.wire.grants;"
        f"heavy = {heavy};"
        "assert importlib.util.find_spec('torch') and importlib.util.find_spec('structlog');"
        "found = [name for name in heavy if name in sys.modules];"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
