"""The built wheel, in clean environments at both ends of the supported range."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"

pytestmark = pytest.mark.slow

ROUND_TRIP = """
import json, sys
import google.protobuf, grpc
from google.protobuf import text_format
from kvplane.v1 import admin_pb2, attach_pb2, cache_pb2, compute_pb2, registry_pb2, step_pb2, types_pb2
from kvplane.v1 import admin_pb2_grpc, cache_pb2_grpc, compute_pb2_grpc, registry_pb2_grpc
from kvplane.wire import directory, grants, options, packed, stamps, status
import kvplane.client
modules = [admin_pb2, attach_pb2, cache_pb2, compute_pb2, registry_pb2, step_pb2, types_pb2]
for golden in json.load(open(sys.argv[1]))["messages"]:
    name = golden["type"].rpartition(".")[2]
    (kind,) = [getattr(module, name) for module in modules if name in module.DESCRIPTOR.message_types_by_name]
    message = text_format.Parse("\\n".join(golden["text"]), kind())
    assert message.SerializeToString(deterministic=True).hex() == golden["hex"], golden["name"]
    assert kind.FromString(bytes.fromhex(golden["hex"])) == message
grants.verify(bytes(32), grants.sign(bytes(32), step_pb2.GrantBody(number=1)))
heavy = [name for name in ("torch", "cupy", "triton", "numba", "structlog") if name in sys.modules]
assert not heavy, heavy
print(json.dumps({"protobuf": google.protobuf.__version__, "grpc": grpc.__version__}))
"""


def environment(name: str) -> Path:
    """Interpreter of an environment of constraints/envs.toml with the wheel installed."""
    command = [sys.executable, str(ROOT / "constraints" / "env.py"), "--with-wheel", name]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def round_trip(python: Path) -> dict[str, str]:
    """Import everything and round-trip the golden messages; returns the runtime's versions."""
    command = [str(python), "-c", ROUND_TRIP, str(GOLDEN / "wire.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=GOLDEN)
    assert done.returncode == 0, done.stderr
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


@pytest.mark.parametrize(("name", "pins"), [("floor", "floor.txt"), ("client", "run.txt")])
def test_the_wheel_works_on_oldest_and_newest(name: str, pins: str) -> None:
    """The generated code and the wire import and agree with the golden bytes on both runtimes."""
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints" / pins).read_text().splitlines() if "==" in line
    )  # fmt: skip
    versions = round_trip(environment(name))
    assert versions == {"protobuf": pinned["protobuf"], "grpc": pinned["grpcio"]}


def test_foreign_distributions_of_our_folder_names_break_nothing() -> None:
    """PyPI has distributions named `kernels` and `clients`; installing and removing them leaves ours whole."""
    python = environment("shadow")
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    constraints = str(ROOT / "constraints" / "shadow.txt")
    subprocess.run([*pip, "install", "--no-deps", "-r", constraints], check=True)
    round_trip(python)
    subprocess.run([*pip, "uninstall", "--yes", "kernels", "clients"], check=True)
    round_trip(python)


def test_the_wheel_holds_all_portions_and_nothing_else() -> None:
    """One top-level package, `kvplane`, with every portion's py.typed, and the commands."""
    python = environment("client")
    listing = subprocess.run(
        [str(python), "-c", "import importlib.metadata as m; print('\\n'.join(map(str, m.files('kvplane'))))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    scripts = {Path(name).name for name in listing if name.startswith("..")}
    assert scripts == {"kvplane", "kvplane-cache", "kvplane-compute"}
    listing = [name for name in listing if not name.startswith("..")]
    tops = {Path(name).parts[0] for name in listing}
    assert tops == {"kvplane", next(top for top in tops if top.endswith(".dist-info"))}
    portions = {path.parent.name for path in ROOT.glob("*/kvplane/*/py.typed")}
    assert portions == {Path(name).parts[1] for name in listing if name.endswith("py.typed")}
