"""Both services on this machine, as child processes that never outlive this one.

`running_pair` starts a cache service and the compute services of one pool, waits until the pool is READY, and takes
everything away when its block ends: on a return, an exception, Ctrl-C, SIGTERM or SIGHUP, at any moment. Sockets are in
a private temporary folder, the pool's memory in one under /dev/shm. When this process is killed with SIGKILL the kernel
kills the children (`kvplane.cli.tether`) and a process beside it removes the folders (`kvplane.cli.janitor`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvplane.cli.child import Child, OnLine
from kvplane.cli.interrupts import Interrupts
from kvplane.cli.pair import READY_SECONDS, OnProgress, RunningPair

__all__ = ["READY_SECONDS", "Child", "OnLine", "OnProgress", "RunningPair", "running_pair"]


@contextmanager
def running_pair(
    compute: Sequence[str],
    *,
    num_shards: int = 1,
    address: str | None = None,
    pool_id: str = "default",
    memory_folder: Path | None = None,
    cache: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    on_line: OnLine | None = None,
    on_progress: OnProgress | None = None,
    ready_seconds: float | None = READY_SECONDS,
) -> Iterator[RunningPair]:
    """Start both services and wait until the pool is READY (`ready_seconds` None: do not wait).

    `compute` holds the flags of `kvplane-compute` that describe the model and the budget; `--tensor-parallel` or
    `--pipeline-parallel` too when there are several shards. `cache` holds flags of `kvplane-cache`. `address` is where
    the cache service listens (default: a socket of the pair's own); `memory_folder` is kept at the end when given.
    `on_line` gets every line that the services log, `on_progress` what is being waited for.

    Inside the block SIGINT raises `KeyboardInterrupt`, SIGTERM and SIGHUP `SystemExit`, once: let it leave the block.
    Raises `UnavailableError` or `DeadlineExceededError` when the pool does not open; nothing is left running then.
    """
    with Interrupts() as interrupts:
        # Looking for a temporary folder makes a file there for a moment.
        with interrupts.shield():
            pair = RunningPair(
                compute,
                num_shards,
                address,
                pool_id,
                memory_folder,
                cache,
                environment or {},
                on_line,
                on_progress,
                interrupts,
            )
        # Twice, since a signal may come in between a `finally` and its first call. After one has raised, no other does.
        try:
            try:
                pair.start()
                if ready_seconds is not None:
                    pair.wait_ready(ready_seconds)
                yield pair
            finally:
                pair.close()
        finally:
            pair.close()
