"""`kvplane top`: pools as they change."""

import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvplane.cli.connection import TIMEOUT_SECONDS, Connection, away
from kvplane.client.control import GrpcCacheControl
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire.errors import KvplaneError, NotFoundError

BAR_CELLS = 60

BLOCK_STATES = {
    "held": ("green", "█"),
    "cached": ("cyan", "▓"),
    "quarantined": ("yellow", "▒"),
    "free": ("bright_black", "░"),
}
"""Colour and sign of each state in the bar; a sign of its own, so that it can be read without colours."""

Samples = Mapping[tuple[str, str], float]
"""Metric samples by name and pool; the pool is empty where a metric has none."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything that was read at one moment."""

    seconds: float
    """`time.monotonic` then."""
    pools: tuple[types_pb2.Pool, ...]
    samples: Samples | None
    """None: no --metrics, or the endpoint did not answer."""


def read(control: GrpcCacheControl, pool_id: str | None, metrics_url: str | None) -> Reading:
    """One reading. Raises `KvplaneError`; metrics that cannot be read are left out."""
    pools = tuple(control.list_pools(cache_pb2.ListPoolsRequest(page_size=1000)).pools)
    if pool_id is not None:
        pools = tuple(pool for pool in pools if pool.pool_id == pool_id)
        if not pools:
            raise NotFoundError(f"there is no pool {pool_id}", metadata={"hint": "`kvplane top` alone shows all pools"})
    samples = None if metrics_url is None else scrape(metrics_url)
    return Reading(time.monotonic(), pools, samples)


def scrape(url: str) -> Samples | None:
    """Samples of a Prometheus endpoint; of histograms, the counts of the core's part. None when it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as page:
            text = page.read().decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError):
        return None
    found: dict[tuple[str, str], float] = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.labels.get("part") in (None, "core"):
            key = (sample.name, sample.labels.get("pool", ""))
            found[key] = found.get(key, 0.0) + sample.value
    return found


def show_once(connection: Connection, pool_id: str | None, metrics_url: str | None, console: Console) -> None:
    """One frame. Raises `KvplaneError`."""
    with connection.channel() as channel:
        try:
            reading = read(connection.control(channel), pool_id, metrics_url)
        except KvplaneError as error:
            raise away(connection, error) from error
    console.print(frame(connection.address, reading, None, metrics_url))


def show_live(
    connection: Connection, pool_id: str | None, metrics_url: str | None, interval_seconds: float, console: Console
) -> None:
    """Frames until Ctrl-C. A cache service that is away is shown as such; the next frame tries again."""
    before: Reading | None = None
    with connection.channel() as channel, Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            try:
                reading = read(connection.control(channel), pool_id, metrics_url)
                live.update(frame(connection.address, reading, before, metrics_url), refresh=True)
                before = reading
            except KvplaneError as error:
                live.update(Text(f"{away(connection, error).message}; trying again", style="red"), refresh=True)
            time.sleep(interval_seconds)


def frame(address: str, now: Reading, before: Reading | None, metrics_url: str | None) -> RenderableType:
    """What one reading looks like; rates come from the one before."""
    parts: list[RenderableType] = [Text.assemble(("kvplane", "bold"), f"  {address}  {time.strftime('%H:%M:%S')}")]
    if not now.pools:
        parts.append(Text("no pool: no compute service has registered (kvplane check says more)", style="yellow"))
    earlier = {pool.pool_id: pool for pool in before.pools} if before is not None else {}
    parts += [_panel(pool, earlier.get(pool.pool_id), now, before) for pool in now.pools]
    if metrics_url is not None and now.samples is None:
        parts.append(Text(f"no metrics at {metrics_url}", style="yellow"))
    return Group(*parts)


def _panel(pool: types_pb2.Pool, earlier: types_pb2.Pool | None, now: Reading, before: Reading | None) -> Panel:
    state = types_pb2.PoolState.Name(pool.state).removeprefix("POOL_STATE_")
    stats = pool.stats
    connected = sum(shard.connected for shard in pool.shards)
    seconds = now.seconds - before.seconds if before is not None else 0.0
    same = earlier is not None and earlier.pool_epoch == pool.pool_epoch and earlier.incarnation == pool.incarnation
    old = earlier.stats if earlier is not None and same else None

    def rate(field: str) -> str:
        if old is None or seconds <= 0:
            return ""
        return f"  ({(getattr(stats, field) - getattr(old, field)) / seconds:,.1f}/s)"

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    counts = {name: getattr(stats, f"{name}_blocks") for name in BLOCK_STATES}
    table.add_row("blocks", bar(counts))
    table.add_row("", "  ".join(f"{BLOCK_STATES[name][1]} {name} {count:,}" for name, count in counts.items()))
    table.add_row("reserved", f"{stats.reserved_blocks:,} blocks promised to prompts that run")
    table.add_row("hit rate", _hit_rate(stats, old))
    table.add_row("sequences", f"{stats.running_sequences:,} running  {stats.waiting_sequences:,} waiting")
    table.add_row("evicted", f"{stats.evicted_blocks:,} blocks{rate('evicted_blocks')}")
    table.add_row("preemptions", f"{stats.preemptions:,}{rate('preemptions')}")
    if now.samples is not None:
        table.add_row("sessions", f"{now.samples.get(('kvplane_sessions', pool.pool_id), 0):,.0f}")
        table.add_row("steps", _steps(now, before, seconds))
    title = (
        f"{pool.pool_id}  {state}  {connected} of {max(1, len(pool.shards))} shards  "
        f"{max(0, pool.num_blocks - 1):,} blocks  epoch {pool.pool_epoch}  incarnation {pool.incarnation}"
    )
    ready = pool.state == types_pb2.POOL_STATE_READY
    return Panel(table, title=title, title_align="left", border_style="green" if ready else "yellow")


def bar(counts: Mapping[str, int], cells: int = BAR_CELLS) -> Text:
    """Blocks by state, in proportion; a state that has any has at least one cell as long as there are enough."""
    total = sum(counts.values())
    if not total:
        return Text("no blocks yet", style="bright_black")
    widths = {name: max(1, round(cells * count / total)) if count else 0 for name, count in counts.items()}
    while sum(widths.values()) != cells:
        widest = max(widths, key=lambda name: widths[name])
        widths[widest] += 1 if sum(widths.values()) < cells else -1
    return Text.assemble(*((BLOCK_STATES[name][1] * width, BLOCK_STATES[name][0]) for name, width in widths.items()))


def _hit_rate(stats: types_pb2.PoolStats, old: types_pb2.PoolStats | None) -> str:
    if not stats.query_tokens:
        return "no prompt yet"
    text = f"{stats.hit_tokens / stats.query_tokens:.1%}  {stats.hit_tokens:,} of {stats.query_tokens:,} tokens"
    asked = stats.query_tokens - old.query_tokens if old is not None else 0
    if old is not None and asked > 0:
        text += f"  (last: {(stats.hit_tokens - old.hit_tokens) / asked:.1%})"
    return text


def _steps(now: Reading, before: Reading | None, seconds: float) -> str:
    key = ("kvplane_step_seconds_count", "")
    count = now.samples.get(key, 0.0) if now.samples is not None else 0.0
    if before is None or before.samples is None or seconds <= 0:
        return f"{count:,.0f} of all pools"
    return f"{count:,.0f} of all pools  ({(count - before.samples.get(key, 0.0)) / seconds:,.1f}/s)"
