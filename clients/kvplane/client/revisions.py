"""What identifies a model and a tokenizer in a folder: the hub's commit, or digests over the files' bytes.

Engines and the operator's tools take them from here, so that both name the same pool. SHA-256 of a file is remembered
in a side file by size and modification time: a folder is read whole only once.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from kvplane.wire.errors import NotFoundError

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
_CONFIG_FILES = ("config.json",)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "*.tiktoken",
)
_SIDE_FILE = "kvplane-digests.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 1 << 22

Advanced = Callable[[int], None]
"""Called with the bytes of every chunk that was read."""


def weights_revision(folder: Path, advanced: Advanced = lambda _: None) -> str:
    """The commit of a hub's snapshot, else a digest over weights and configuration: other bytes, other revision.

    Raises `NotFoundError` when there are no weights.
    """
    found = snapshot_revision(folder)
    if found is not None:
        return found
    weights = weight_files(folder)
    if not weights:
        raise NotFoundError(
            f"{folder} holds no weights ({', '.join(WEIGHT_FILES)})", metadata={"hint": "give --weights-revision"}
        )
    return _digest(folder, [*weights, *_existing(folder, _CONFIG_FILES)], advanced)


def tokenizer_revision(folder: Path) -> str:
    """The same over the files that decide which token ids a text has; empty when there is no tokenizer."""
    found = snapshot_revision(folder)
    files = _existing(folder, _TOKENIZER_FILES)
    return found or (_digest(folder, files, lambda _: None) if files else "")


def snapshot_revision(folder: Path) -> str | None:
    """The commit of a model in a hub's cache (`…/snapshots/COMMIT`); None for any other folder."""
    resolved = folder.resolve()
    return resolved.name if resolved.parent.name == "snapshots" and _COMMIT.fullmatch(resolved.name) else None


def weight_files(folder: Path) -> list[Path]:
    """What `weights_revision` reads."""
    return _existing(folder, WEIGHT_FILES)


def _existing(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _digest(folder: Path, files: list[Path], advanced: Advanced) -> str:
    known = _remembered(folder)
    found: dict[str, list[int | str]] = {}
    for path in files:
        status = path.stat()
        entry = known.get(path.name)
        if entry is None or entry[:2] != [status.st_size, status.st_mtime_ns]:
            entry = [status.st_size, status.st_mtime_ns, _sha256(path, advanced)]
        found[path.name] = entry
    if any(known.get(name) != entry for name, entry in found.items()):
        _remember(folder, known | found)
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.name}\0{found[path.name][2]}\n".encode())
    return whole.hexdigest()[:32]


def _sha256(path: Path, advanced: Advanced) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            advanced(len(chunk))
    return digest.hexdigest()


def _remembered(folder: Path) -> dict[str, list[int | str]]:
    try:
        known = json.loads((folder / _SIDE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(folder: Path, entries: dict[str, list[int | str]]) -> None:
    """A folder that cannot be written is read again the next time."""
    try:
        handle, name = tempfile.mkstemp(prefix=_SIDE_FILE, dir=folder)
        with os.fdopen(handle, "w") as file:
            json.dump(entries, file)
        Path(name).replace(folder / _SIDE_FILE)
    except OSError:
        return
