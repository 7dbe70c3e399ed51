"""The one place where numba's untyped decorators meet the type checkers, and where compiled code is kept."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import config
from numba.extending import intrinsic as _numba_intrinsic

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _numba_intrinsic


def _sources_digest() -> str:
    """Numba's cache looks at the compiled function's own file only; these kernels inline each other across files."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def cache_folder() -> Path:
    """Where compiled kernels are kept: under NUMBA_CACHE_DIR if set, else the user's cache folder, else a private temporary one.

    Always writable. The last part names the sources and the numba version, so stale code is never loaded.
    """
    candidates = (
        [Path.home() / ".cache"]
        if "XDG_CACHE_HOME" not in os.environ
        else [Path(os.environ["XDG_CACHE_HOME"])]
    )
    if os.environ.get("NUMBA_CACHE_DIR"):
        candidates.insert(0, Path(os.environ["NUMBA_CACHE_DIR"]))
    for candidate in candidates:
        folder = candidate / "kvplane" / f"kernels-{_sources_digest()}"
        if _writable(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="kvplane-kernels-"))


CACHE_FOLDER = cache_folder()


def jit(function: Compiled) -> Compiled:
    """Compile at the first call for each combination of argument types; runs without the GIL, never bounds-checked."""
    previous = config.CACHE_DIR
    config.CACHE_DIR = str(CACHE_FOLDER)
    try:
        compiled: Compiled = numba.njit(nogil=True, error_model="numpy", boundscheck=False, cache=True)(
            function
        )
    finally:
        config.CACHE_DIR = previous
    return compiled
