"""What tests of the command share: its outcome, a pair of services, and who is left of a family of processes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplane.compute.server import ComputeServer
from service_rig import RunningService


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    status: int
    out: str
    err: str

    def finding(self, check: str) -> str:
        """The line of `kvplane check` about this, and the hint below it."""
        lines = self.out.splitlines()
        (at,) = [index for index, line in enumerate(lines) if line[2:].startswith(f"{check}: ")]
        following = lines[at + 1 : at + 2]
        return lines[at] + ("\n" + following[0].strip() if following and following[0].startswith("    →") else "")


Kvplane = Callable[..., Ran]


@dataclass(frozen=True)
class Pair:
    """Both services in this process."""

    cache: RunningService
    compute: ComputeServer
    address: str
    folder: Path


MODEL: dict[str, Any] = {
    "weights_revision": "w1",
    "tokenizer_revision": "t1",
    "kv_dtype": "bfloat16",
    "block_tokens": 16,
}


MARK = "KVPLANE_TEST_MARK"
"""Environment variable that a process and all that it starts inherit."""


def marked(mark: str) -> list[str]:
    """Command lines of all processes that have inherited a mark."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found
