"""Revisions of a model in a folder, for pools whose operator gives none."""

import re
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from kvplane.wire.errors import NotFoundError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
_TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.tiktoken")
_CHUNK_BYTES = 1 << 22


def snapshot_revision(folder: Path) -> str | None:
    """The commit of a model in a hub's cache (`…/snapshots/COMMIT`); None for any other folder."""
    resolved = folder.resolve()
    return resolved.name if resolved.parent.name == "snapshots" and _COMMIT.fullmatch(resolved.name) else None


def weights_revision(folder: Path, advanced: Callable[[int], None] = lambda _: None) -> str:
    """The commit of a hub's snapshot, else SHA-256 over config.json and all weight files: other bytes, other revision.

    `advanced` is called with the bytes of every chunk that was read. Raises `NotFoundError` when there are no weights.
    """
    found = snapshot_revision(folder)
    if found is not None:
        return found
    files = weight_files(folder)
    if not files:
        raise NotFoundError(
            f"{folder} holds no weights ({', '.join(_WEIGHTS)})", metadata={"hint": "give --weights-revision"}
        )
    return _digest([*files, folder / "config.json"], advanced)


def tokenizer_revision(folder: Path) -> str:
    """The same over the tokenizer's files; empty when there are none."""
    found = snapshot_revision(folder)
    files = _matching(folder, _TOKENIZER)
    return found or (_digest(files, lambda _: None) if files else "")


def weight_files(folder: Path) -> list[Path]:
    """What `weights_revision` reads."""
    return _matching(folder, _WEIGHTS)


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _digest(files: Iterable[Path], advanced: Callable[[int], None]) -> str:
    digest = sha256()
    for path in files:
        # Name and size first, so that no two lists of files read alike.
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                advanced(len(chunk))
    return digest.hexdigest()
