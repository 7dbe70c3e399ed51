"""The one place where numba's untyped decorators meet the type checkers, and where compiled code is kept."""

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import config as _config
from numba.extending import intrinsic as _numba_intrinsic

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _numba_intrinsic
config: Any = _config


def _sources_digest() -> str:
    """Numba's cache looks at a function's own file only; these kernels inline each other across files."""
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
    """Where compiled kernels are kept; always writable.

    Under NUMBA_CACHE_DIR if set, else in the user's cache folder, else in a private temporary one. The last
    part names the sources and the numba version, so stale code is never loaded.
    """
    candidates = [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")]
    if os.environ.get("NUMBA_CACHE_DIR"):
        candidates.insert(0, Path(os.environ["NUMBA_CACHE_DIR"]))
    for candidate in candidates:
        folder = candidate / "kvplane" / f"kernels-{_sources_digest()}"
        if _writable(folder):
            return folder
    folder = Path(tempfile.mkdtemp(prefix="kvplane-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


CACHE_FOLDER = cache_folder()


def jit(function: Compiled) -> Compiled:
    """Compile at the first call with each combination of argument types; without the GIL or bounds checks."""
    previous = config.CACHE_DIR
    config.CACHE_DIR = str(CACHE_FOLDER)
    try:
        compiled: Any = numba.njit(nogil=True, error_model="numpy", boundscheck=False, cache=True)(function)
    finally:
        config.CACHE_DIR = previous
    return cast("Compiled", compiled)
