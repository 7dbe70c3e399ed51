"""`kvplane up`: both services on this machine, for as long as the command runs."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.status import Status

from kvplane.cli import console
from kvplane.cli.capacity import CapacityPlan
from kvplane.cli.logs import event_of, last_words
from kvplane.cli.plan import compute_flags
from kvplane.cli.processes import RunningPair, running_pair
from kvplane.cli.sizes import format_bytes
from kvplane.client import revisions
from kvplane.wire.errors import UnavailableError

WATCH_SECONDS = 0.2
"""How often the services are looked at."""

_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
_HIDDEN = frozenset({"event", "level", "timestamp"})


def run(
    plan: CapacityPlan,
    weights_revision: str,
    tokenizer_revision: str,
    *,
    address: str,
    pool_id: str,
    memory_folder: Path | None,
    threads: int | None,
    metrics_port: int | None,
    verbose: bool,
    quiet: bool,
) -> None:
    """Serve until a signal comes. Raises `KvplaneError` when a service ends by itself."""
    flags = [*compute_flags(plan, weights_revision), "--tokenizer-revision", tokenizer_revision]
    flags += [] if threads is None else ["--threads", str(threads)]
    cache: Sequence[str] = ()
    if verbose:
        cache = ["--log-level", "debug"]
        flags += cache
    if metrics_port is not None:
        cache = [*cache, "--metrics-address", f"127.0.0.1:{metrics_port}"]
    ready = False
    try:
        with ExitStack() as shown:
            status = shown.enter_context(console.err.status("starting"))
            with running_pair(
                flags,
                num_shards=plan.deployment.num_shards,
                address=address,
                pool_id=pool_id,
                memory_folder=memory_folder,
                cache=cache,
                on_line=lambda name, line: None if quiet else show_line(name, line, verbose=verbose),
                on_progress=lambda what: _show_progress(status, what),
            ) as pair:
                ready = True
                _say_ready(pair, plan, metrics_port)
                _watch(pair)
    except (KeyboardInterrupt, SystemExit):
        if not ready:
            console.err.print("stopped before the pool was open; nothing is left")
            raise
        console.err.print("stopped; nothing is left" + ("" if memory_folder is None else f" but {memory_folder}"))


def weights_revision_of(folder: Path) -> str:
    """Revision of the weights in a folder, with a progress bar while they are read."""
    if revisions.snapshot_revision(folder) is not None:
        return revisions.weights_revision(folder)
    total = sum(path.stat().st_size for path in revisions.weight_files(folder))
    columns = (TextColumn("reading the weights for their revision"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console.err, transient=True) as progress:
        task = progress.add_task("", total=total)
        return revisions.weights_revision(folder, lambda size: progress.advance(task, size))


def show_line(name: str, line: str, *, verbose: bool) -> None:
    """A line of a service's log on standard error, with the service's name."""
    event = event_of(line)
    if not event:
        console.err.print(f"[dim]{name:<10}[/] {escape(line)}")
        return
    level = str(event.get("level", "info"))
    # Calls that went well are the bulk: `kvplane top` makes one a second.
    if not verbose and event.get("event") == "rpc" and event.get("code") == "OK":
        return
    clock = str(event.get("timestamp", ""))[11:19]
    rest = " ".join(f"{key}={value}" for key, value in event.items() if key not in _HIDDEN)
    text = f"{escape(str(event.get('event')))} [dim]{escape(rest)}[/]"
    style = _STYLES.get(level)
    console.err.print(f"[dim]{clock} {name:<10}[/] " + (f"[{style}]{level}: {text}[/]" if style else text))


def _show_progress(status: Status, what: str) -> None:
    if what:
        status.update(what)
        status.start()
        # Without a terminal there is no spinner: say it in a line.
        if not console.err.is_terminal:
            console.err.print(what)
    else:
        status.stop()


def _say_ready(pair: RunningPair, plan: CapacityPlan, metrics_port: int | None) -> None:
    console.err.print(
        f"[bold green]READY[/] pool {escape(pair.pool_id)} at {escape(pair.address)}: {plan.num_blocks - 1:,} blocks, "
        f"{plan.num_tokens:,} tokens, {format_bytes(sum(shard.total_bytes for shard in plan.shards))} in "
        f"{escape(str(pair.memory_folder))}"
    )
    if metrics_port is not None:
        console.err.print(f"metrics at http://127.0.0.1:{metrics_port}/metrics")
    console.err.print(f"engines: export KVPLANE_ADDRESS={escape(pair.address)}    look: kvplane check, kvplane top")
    console.err.print("Ctrl-C stops both and frees the memory")


def _watch(pair: RunningPair) -> None:
    while True:
        for child in (pair.cache, *pair.computes):
            if not child.alive:
                raise UnavailableError(
                    f"{child.name} ended with status {child.status}: {last_words(child.lines)}",
                    metadata={"hint": "both services are stopped; `kvplane up` starts them again"},
                )
        time.sleep(WATCH_SECONDS)
