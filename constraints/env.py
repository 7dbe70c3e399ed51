"""Make a virtual environment of `envs.toml` under `.envs/`, or reuse it while its pins are unchanged.

Usage: python3 constraints/env.py NAME [NAME ...]      prints the path of each environment's interpreter
       python3 constraints/env.py --wheel              builds the wheel into dist/ and prints its path
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints"
SOURCES = ("protos", "cache_service", "compute_service", "kernels", "clients")


def run(*command: str | Path) -> None:
    """Run a command with its output on stderr, so that stdout holds results only."""
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr, cwd=ROOT)


def make(name: str) -> Path:
    """Return the interpreter of environment `name`, installing it first unless its pins are unchanged."""
    table = tomllib.loads((PINS / "envs.toml").read_text())
    if name not in table:
        raise SystemExit(f"no environment {name!r} in constraints/envs.toml; there are: {', '.join(table)}")
    spec = table[name]
    folder = ROOT / ".envs" / name
    python = folder / "bin" / "python"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = folder / "pins.sha256"
        key = _key(spec)
        if stamp.exists() and stamp.read_text() == key:
            return python
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing environment {name}", file=sys.stderr)
        run(sys.executable, "-m", "venv", folder)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if "exact" in spec:
            run(*pip, "--no-deps", "-r", PINS / spec["exact"])
        else:
            run(*pip, "-c", PINS / spec["pins"], *spec["packages"])
            if "alone" in spec:
                run(*pip, "--no-deps", "-c", PINS / spec["pins"], *spec["alone"])
        stamp.write_text(key)
    return python


def _key(spec: dict[str, object]) -> str:
    """What an environment depends on: its entry, its pins, and the interpreter."""
    digest = hashlib.sha256(repr((sorted(spec.items()), sys.version)).encode())
    digest.update((PINS / str(spec.get("exact") or spec["pins"])).read_bytes())
    return digest.hexdigest()


def _source_key() -> str:
    """Digest of everything the wheel is built from."""
    digest = hashlib.sha256()
    files = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]
    for source in SOURCES:
        files += sorted(path for path in (ROOT / source).rglob("*") if path.is_file())
    for path in files:
        if "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def wheel() -> Path:
    """Build the wheel into `dist/`, unless the sources are those of the one that lies there."""
    dist = ROOT / "dist"
    python = make("build")
    with (ROOT / ".envs" / "dist.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = dist / "sources.sha256"
        key = _source_key()
        if not (stamp.exists() and stamp.read_text() == key):
            shutil.rmtree(dist, ignore_errors=True)
            run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", dist, ROOT)
            stamp.write_text(key)
        (path,) = dist.glob("kvplane-*.whl")
    return path


def install_wheel(python: Path) -> None:
    """Install the wheel into an environment, without dependencies, unless it holds this very wheel already."""
    path = wheel()
    stamp = python.parent.parent / "wheel.sha256"
    key = hashlib.sha256(path.read_bytes()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == key):
        run(python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", path)
        stamp.write_text(key)


def main(arguments: list[str]) -> None:
    """Make what the command line names."""
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    if arguments == ["--wheel"]:
        print(wheel())
        return
    with_wheel = "--with-wheel" in arguments
    for name in arguments:
        if name != "--with-wheel":
            python = make(name)
            if with_wheel:
                install_wheel(python)
            print(python)


if __name__ == "__main__":
    main(sys.argv[1:])
