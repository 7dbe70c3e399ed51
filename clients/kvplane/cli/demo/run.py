"""The demo from begin to end, as readable tables."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape
from rich.rule import Rule
from rich.status import Status
from rich.table import Table

from kvplane.cli import console
from kvplane.cli.demo import prompts, scenes
from kvplane.cli.demo.scenes import Answer
from kvplane.cli.pair import RunningPair
from kvplane.cli.processes import running_pair
from kvplane.v1 import types_pb2
from kvplane.wire.errors import DataLossError, InternalError

POOL_BYTES = 192 * 2**20


def run(model: str, compute_flags: list[str], model_name: str) -> None:
    """Play all scenes. Raises `DataLossError` when a text differs, `InternalError` when something is left behind."""
    started = time.monotonic()
    with _progress() as say, running_pair(compute_flags, on_progress=lambda what: say(what)) as pair:
        _show_processes(pair, model_name)
        answers = _play(pair, model, say)
        say("waiting for the pool to settle")
        pool = scenes.settled(pair)
        say("")
        _show_blocks(pool)
        pids, folders = pair.pids, (pair.memory_folder, pair.runtime_folder)
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()] + [str(each) for each in folders if each.exists()]
    if left:
        raise InternalError(f"left behind: {left}")
    wrong = [each.engine for each in answers if not each.equal]
    if wrong:
        raise DataLossError(f"{', '.join(wrong)} did not answer what plain transformers answers")
    console.out.print(
        f"\n[bold green]All {len(answers)} texts equal plain transformers token by token; nothing is left running, "
        f"nothing in /dev/shm.[/] {time.monotonic() - started:.0f} s"
    )


def _play(pair: RunningPair, model: str, say: scenes.OnProgress) -> list[Answer]:
    counts = dict.fromkeys("ABC", scenes.MAX_NEW_TOKENS) | {"D": scenes.LONG_ANSWER_TOKENS}
    truth = scenes.references(pair, model, counts, say)

    _scene(say, "Two engine processes share one pool", "B has never seen the system prompt; the pool has, from A.")
    first = scenes.start_engine(pair, "A", model, say)
    second = scenes.start_engine(pair, "B", model, say)
    answers = [scenes.ask(first, "A", truth["A"], say), scenes.ask(second, "B", truth["B"], say)]
    say("")
    _show_answers(answers)
    cold, warm = (each.first_token_seconds for each in answers)
    console.out.print(f"First token after {warm:.2f} s instead of {cold:.2f} s.")

    _scene(say, "An engine dies", f"kill -9 {first.pid} (A). A new engine still hits what A had computed.")
    first.kill()
    third = scenes.start_engine(pair, "C", model, say)
    answers.append(scenes.ask(third, "C", truth["C"], say))
    say("")
    _show_answers(answers[-1:])

    _scene(
        say,
        "The cache service dies",
        f"kill -9 {pair.cache.pid} (cache service) while C writes a long answer, then start it again. It has no "
        "journal: the shards tell what they hold, C declares its sequence, and both go on.",
    )
    restarted: list[float] = []

    def kill_once(tokens: int) -> None:
        if tokens >= min(scenes.KILL_AFTER_TOKENS, len(truth["D"].token_ids) // 2) and not restarted:
            begin = time.monotonic()
            pair.restart_cache(kill=True)
            restarted.append(time.monotonic() - begin)

    answers.append(scenes.ask(third, "D", truth["D"], say, kill_once))
    say("")
    _show_answers(answers[-1:])
    console.out.print(
        f"The service was back after {restarted[0]:.1f} s; the longest pause between two tokens was "
        f"{answers[-1].longest_pause_seconds:.1f} s; the text is what it would have been."
    )
    for engine in (second, third):
        engine.stop()
    return answers


@contextmanager
def _progress() -> Iterator[scenes.OnProgress]:
    """Says what is being done: a spinner on a terminal, lines elsewhere."""
    status = Status("", console=console.err)

    def say(what: str) -> None:
        if not what:
            status.stop()
        elif console.err.is_terminal:
            status.update(escape(what))
            status.start()
        else:
            console.err.print(f"  … {escape(what)}")

    try:
        yield say
    finally:
        status.stop()


def _scene(say: scenes.OnProgress, title: str, what: str) -> None:
    say("")
    console.out.print()
    console.out.print(Rule(title, align="left"))
    console.out.print(what)


def _show_processes(pair: RunningPair, model_name: str) -> None:
    pool = pair.pool()
    table = Table(title="Running", title_justify="left")
    for name in ("process", "pid", "owns"):
        table.add_column(name)
    table.add_row(
        "cache service", str(pair.cache.pid), f"{pool.num_blocks - 1:,} blocks of {pool.model.block_tokens} tokens"
    )
    for child in pair.computes:
        table.add_row(child.name, str(child.pid), f"their bytes, in {pair.memory_folder}")
    console.out.print(table)
    console.out.print(
        f"Model: {escape(model_name)}, fp32. System prompt: {len(prompts.SYSTEM.split()):,} words, the same for all."
    )


def _show_answers(answers: list[Answer]) -> None:
    table = Table()
    for name in ("engine", "prompt", "hit", "rest of it", "first token", "as plain transformers"):
        table.add_column(name, justify="left" if name in ("engine", "rest of it") else "right")
    for each in answers:
        table.add_row(
            each.engine,
            f"{each.prompt_tokens:,}",
            f"{each.cached_tokens:,}",
            each.hit_reason.lower().replace("_", " "),
            f"{each.first_token_seconds:.2f} s",
            "[green]yes[/]" if each.equal else "[bold red]NO[/]",
        )
    console.out.print(table)
    for each in answers:
        console.out.print(f"[dim]{escape(each.engine)}:[/] {escape(' '.join(each.text.split()))}")


def _show_blocks(pool: types_pb2.Pool) -> None:
    stats = pool.stats
    table = Table(title="Blocks at the end", title_justify="left")
    for name in ("free", "cached", "held", "quarantined", "sum", "pool"):
        table.add_column(name, justify="right")
    parts = (stats.free_blocks, stats.cached_blocks, stats.held_blocks, stats.quarantined_blocks)
    table.add_row(*(f"{each:,}" for each in (*parts, sum(parts), pool.num_blocks - 1)))
    console.out.print()
    console.out.print(table)
