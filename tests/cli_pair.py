"""A pair of services that a test interrupts, as a process: `python tests/cli_pair.py MEMORY [wait]`."""

import sys
import time
from pathlib import Path

from kvplane.cli import pair
from kvplane.cli.processes import running_pair

SMALL = [
    *("--weights-revision", "w", "--num-layers", "2", "--num-kv-heads", "2", "--head-dim", "16"),
    *("--kv-dtype", "float32", "--pool-bytes", "524288", "--threads", "1"),
]
"""Flags of a small pool: 64 blocks of 8,192 bytes."""


def main() -> None:
    """Print what is waited for, `ready` and the children's pids, then wait for the end."""
    pair.SHARED_MEMORY = Path(sys.argv[1])
    with running_pair(SMALL, on_progress=lambda what: print(what, flush=True)) as started:
        print("ready", *started.pids, flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
