"""`kvplane cache` and `kvplane compute`: the services themselves, with their own flags and help."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from kvplane.wire.errors import NotFoundError

NEEDS = {"cache": ("structlog", "pydantic_settings"), "compute": ("torch", "numba")}
"""A service's extra brings these."""


def become(service: str, arguments: Sequence[str]) -> None:
    """Replace this process with a service. Raises `NotFoundError` when its extra is not installed."""
    require(service)
    os.execv(sys.executable, [sys.executable, "-m", f"kvplane.{service}", *arguments])


def require(service: str) -> None:
    """Raises `NotFoundError` that names the extra when a service cannot run here."""
    missing = [name for name in NEEDS[service] if find_spec(name) is None]
    if missing:
        raise NotFoundError(
            f"kvplane {service} needs {missing[0]}, which is not installed",
            metadata={"hint": f"pip install 'kvplane[{service}]'"},
        )
