"""What identifies a model and a tokenizer: digests over their files.

So two folders with equal bytes share a cache, wherever they are. SHA-256 of a file is remembered in a side file by
size and modification time: a folder is read whole only once.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
_CONFIG_FILES = ("config.json",)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
_SIDE_FILE = "kvplane-digests.json"


def weights_revision(folder: Path) -> str:
    """Digest of the weights and the configuration that gives them their meaning. Raises `FileNotFoundError`."""
    weights = _existing(folder, WEIGHT_FILES)
    if not weights:
        raise FileNotFoundError(f"{folder} holds no weights ({', '.join(WEIGHT_FILES)})")
    return _digest(folder, [*weights, *_existing(folder, _CONFIG_FILES)])


def tokenizer_revision(folder: Path) -> str:
    """Digest of the files that decide which token ids a text has; that of no file when there is no tokenizer."""
    return _digest(folder, _existing(folder, _TOKENIZER_FILES))


def _existing(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _digest(folder: Path, files: list[Path]) -> str:
    known = _remembered(folder)
    found: dict[str, list[int | str]] = {}
    for path in files:
        status = path.stat()
        entry = known.get(path.name)
        if entry is None or entry[:2] != [status.st_size, status.st_mtime_ns]:
            with path.open("rb") as content:
                entry = [status.st_size, status.st_mtime_ns, hashlib.file_digest(content, "sha256").hexdigest()]
        found[path.name] = entry
    if any(known.get(name) != entry for name, entry in found.items()):
        _remember(folder, known | found)
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.name}\0{found[path.name][2]}\n".encode())
    return whole.hexdigest()[:32]


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
