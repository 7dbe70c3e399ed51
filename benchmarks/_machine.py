"""What every benchmark prints: the machine, the versions, and medians with their p99."""

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGES = ("kvplane", "grpcio", "protobuf", "numpy", "torch", "numba", "transformers")


def cpu_name() -> str:
    """Model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Installed versions of packages; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_machine() -> None:
    """Print the machine and the versions."""
    print(f"machine: {cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()))


def p99(samples: Sequence[float]) -> float:
    """99th percentile (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def line(name: str, samples: Sequence[float], unit: str = "ms") -> float:
    """Print median, p99 and count of a figure; return the median."""
    median = statistics.median(samples)
    print(f"{name:<46} median {median:10.4f} {unit}   p99 {p99(samples):10.4f} {unit}   n {len(samples)}")
    return median


def finish(result: Mapping[str, object]) -> None:
    """Print the result as one JSON object: the last line of every benchmark."""
    print(json.dumps(result))
    sys.stdout.flush()
