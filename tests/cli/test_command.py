"""The `kvplane` command: help, plan, top, up, the services under it, and how it fails."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_rig import MARK, Kvplane, Pair, marked
from kvplane.cli import top
from kvplane.cli.capacity import Deployment, plan
from kvplane.cli.model import LayerGroup, ModelShape
from kvplane.cli.plan import compute_flags
from kvplane.client import revisions
from kvplane.compute.config import load
from kvplane.compute.identity import identity_of, max_blocks
from kvplane.v1 import types_pb2
from service_rig import RunningService, wait_until
from tensorless_shard import TensorlessShard
from wire_engine import A, B, WireEngine, admit, commit, finish, new_sequence

COMMANDS = ("cache", "compute", "up", "check", "top", "plan")
SHAPE = ("--num-layers", "2", "--num-kv-heads", "2", "--head-dim", "16", "--kv-dtype", "float32")


def command(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvplane.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def test_help_names_every_command(kvplane: Kvplane) -> None:
    """And each explains itself and its options."""
    ran = kvplane("--help")
    assert ran.status == 0
    for name in COMMANDS:
        assert f"\n│ {name} " in ran.out
    for name, words in (("up", "--memory-folder"), ("check", "--tls-ca"), ("top", "--metrics"), ("plan", "--length")):
        assert words in kvplane(name, "--help").out


def test_completion() -> None:
    """A shell is told the commands."""
    completing = command("", _KVPLANE_COMPLETE="complete_bash", COMP_WORDS="kvplane ", COMP_CWORD="1")
    out, _ = completing.communicate(timeout=20)
    assert set(COMMANDS) <= set(out.split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["plan", "--num-layers", "2", "--memory", "1GiB"], "--num-kv-heads, --head-dim missing"),
        (
            ["plan", "--num-layers", "2", "--num-kv-heads", "2", "--head-dim", "16", "--memory", "1GiB"],
            "give --kv-dtype",
        ),
        (["plan", *SHAPE, "--memory", "lots"], "'lots' is no size"),
        (["plan", *SHAPE, "--memory", "1GiB", "--tensor-parallel", "3"], "3 does not split 2 KV heads"),
        (["plan", "--model", "x", *SHAPE, "--memory", "1GiB"], "leave --num-layers out"),
        (["up", *SHAPE, "--memory", "1MiB"], "give --weights-revision"),
        (["up", *SHAPE, "--memory", "1MiB", "--weights-revision", "w", "--address", "127.0.0.1:1"], "is TCP"),
    ],
)
def test_wrong_usage_is_one_line(kvplane: Kvplane, arguments: list[str], line: str) -> None:
    """Exit status 2, and what to give instead."""
    ran = kvplane(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("kvplane: ")
    assert line in ran.err
    assert ran.err.count("\n") == 1


def test_failures_are_a_line_and_a_hint(kvplane: Kvplane, tmp_path: Path) -> None:
    """Exit status 1."""
    ran = kvplane("plan", "--model", tmp_path, "--memory", "1GiB")
    assert ran.status == 1
    assert ran.err == f"kvplane: there is no {tmp_path}/config.json\nhint: --model takes a folder with a config.json\n"
    ran = kvplane("plan", *SHAPE, "--memory", "1KiB")
    assert ran.status == 1
    assert "a pool has at least 2" in ran.err
    assert kvplane("no-such-command").status == 2


def test_plan_prints_flags_that_make_the_pool(kvplane: Kvplane, tmp_path: Path) -> None:
    """The compute service understands the printed commands and makes as many blocks; tables say the same as JSON."""
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_size": 256,
        "sliding_window": 100,
        "dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ("--model", tmp_path, "--memory", "8MiB", "--tensor-parallel", 2, "--pipeline-parallel", 2, "--length", 500)
    made = json.loads(kvplane("plan", *given, "--json").out)
    table = kvplane("plan", *given).out
    assert f"{made['num_blocks']:,} (one is the null block)" in table
    assert made["sequences"][0]["num_blocks"] == 8
    assert len(made["commands"]) == 4
    for rank, flags in enumerate(made["commands"]):
        assert "  " + " ".join(flags) in table
        settings = load([*flags[1:], "--memory-folder", str(tmp_path)])
        assert settings.rank == rank
        assert settings.window_tokens == 100
        assert max_blocks(settings, identity_of(settings)) == made["num_blocks"]


def test_plan_of_layers_of_two_kinds(kvplane: Kvplane, tmp_path: Path) -> None:
    """What each kind needs, and that one pool stores all in full."""
    config = {
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 64,
        "hidden_size": 256,
        "sliding_window": 128,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = kvplane("plan", "--model", tmp_path, "--memory", "64MiB", "--length", 1024).out
    assert "window of 128" in out
    assert "stores all of them in full" in " ".join(out.split())
    assert "--window-tokens" not in out


def test_top_shows_what_the_pool_counts(kvplane: Kvplane, tmp_path: Path) -> None:
    """Blocks by state, hits, sequences; sessions and steps from the metrics."""
    cache = RunningService(tmp_path)
    shard = TensorlessShard(cache.address).start()
    cache.wait_ready()
    engine = WireEngine(cache.control())
    engine.step(admit=admit(new_sequence(A, range(40))))
    engine.step(commit=commit((A, 40)))
    engine.settle()
    engine.step(admit=admit(new_sequence(B, range(40))))
    plane = cache.server.plane
    cache.on_loop(lambda: plane.metrics.refresh(plane.pools.values(), plane.clock()))
    url = f"http://127.0.0.1:{cache.server.metrics_port}/metrics"
    out = kvplane("top", "--address", cache.address, "--metrics", url).out
    assert "default  READY  1 of 1 shards  63 blocks" in out
    assert "held 4  ▓ cached 0  ▒ quarantined 0  ░ free 59" in out
    assert "40.0%  32 of 80 tokens" in out
    assert "2 running  0 waiting" in out
    assert f"{engine.step_id} of all pools" in out
    assert "sessions     1" in out
    engine.step(finish=finish(A, B))
    nothing = "http://127.0.0.1:1/"
    assert f"no metrics at {nothing}" in kvplane("top", "--once", "--address", cache.address, "--metrics", nothing).out
    assert kvplane("top", "--address", cache.address, "--pool-id", "other").status == 1
    shard.stop()
    cache.stop()


def test_top_on_a_terminal(pair: Pair) -> None:
    """Frames come until Ctrl-C, which ends it well."""
    ours, theirs = pty.openpty()
    arguments = ["top", "--address", pair.address, "--interval", "0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvplane.cli", *arguments],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    seen = b""
    while seen.count(b"hit rate") < 3:
        seen += os.read(ours, 65_536)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    os.close(ours)


@pytest.mark.parametrize(
    "counts",
    [
        {"held": 0, "cached": 0, "quarantined": 0, "free": 63},
        {"held": 1, "cached": 10**6, "quarantined": 1, "free": 0},
        {"held": 33, "cached": 33, "quarantined": 33, "free": 1},
    ],
)
def test_bars_have_one_width(counts: dict[str, int]) -> None:
    """In proportion, and no state that has blocks vanishes."""
    bar = top.bar(counts, 20).plain
    assert len(bar) == 20
    for name, count in counts.items():
        assert (top.BLOCK_STATES[name][1] in bar) == (count > 0)


def test_rates_come_from_two_readings() -> None:
    """Evictions a second; not over a change of the pool's epoch."""

    def reading(seconds: float, evicted: int, epoch: int = 1) -> top.Reading:
        stats = types_pb2.PoolStats(evicted_blocks=evicted, query_tokens=10 * evicted, hit_tokens=5 * evicted)
        pool = types_pb2.Pool(pool_id="p", pool_epoch=epoch, state=types_pb2.POOL_STATE_READY, stats=stats)
        return top.Reading(seconds, (pool,), None)

    from rich.console import Console

    def text(now: top.Reading, before: top.Reading) -> str:
        console = Console(width=120)
        with console.capture() as captured:
            console.print(top.frame("unix:/x", now, before, None))
        return captured.get()

    assert "150 blocks  (25.0/s)" in text(reading(12.0, 150), reading(10.0, 100))
    assert "(last: 50.0%)" in text(reading(12.0, 150), reading(10.0, 100))
    assert "/s)" not in text(reading(12.0, 150, epoch=2), reading(10.0, 100))


def test_services_have_their_own_help_and_errors() -> None:
    """All arguments pass through, and the exit status comes back."""
    helping, failing = command("compute", "--help"), command("cache", "--no-such-flag", "1")
    out, _ = helping.communicate(timeout=30)
    assert helping.returncode == 0
    assert "usage: kvplane-compute" in out
    _, err = failing.communicate(timeout=30)
    assert failing.returncode == 2
    assert "--no-such-flag" in err


def up(tmp_path: Path, *more: str) -> "subprocess.Popen[str]":
    """`kvplane up` with a small pool; the folder marks its processes."""
    given = ("--memory", "512KiB", "--weights-revision", "w", "--threads", "1", "--address", f"unix:{tmp_path}/c.sock")
    return command("up", *SHAPE, *given, *more, **{MARK: str(tmp_path), "TMPDIR": str(tmp_path)})


def test_up_serves_and_leaves_nothing(tmp_path: Path, kvplane: Kvplane) -> None:
    """READY with as many blocks as planned, healthy by `check`, logs with names, and gone after SIGTERM; the memory
    folder that was asked for stays."""
    process = up(tmp_path, "--memory-folder", str(tmp_path / "memory"), "--tensor-parallel", "2")
    assert process.stderr is not None
    lines: list[str] = []
    with process.stderr as errors:
        while not (lines and lines[-1].startswith("READY")):
            lines.append(errors.readline())
            assert lines[-1], lines
        planned = plan(
            ModelShape((LayerGroup(2, None),), 2, 16, None), Deployment("float32", tensor_parallel=2), 512 * 1024
        )
        assert f"{planned.num_blocks - 1:,} blocks" in lines[-1]
        ran = kvplane("check", "--address", f"unix:{tmp_path}/c.sock", "--weights-revision", "w")
        assert ran.status == 0, ran.out
        assert "2 of 2 connected" in ran.out
        assert any("compute-1  listening" in line for line in lines)
        sizes = {path.parent.name: path.stat().st_size for path in (tmp_path / "memory").glob("*/blocks-*")}
        assert sizes == {f"default-{shard.rank}": shard.tensor_bytes for shard in planned.shards}
        process.send_signal(signal.SIGTERM)
        rest = errors.read()
    assert process.wait(20) == 0
    assert f"nothing is left but {tmp_path}/memory" in rest
    assert not marked(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]
    assert process.stdout is not None
    process.stdout.close()


def test_up_says_why_it_ends(tmp_path: Path, pair: Pair) -> None:
    """Somebody listens on the address already; interrupted while starting, the status is the signal's."""
    taken = up(tmp_path, "--address", pair.address)
    _, err = taken.communicate(timeout=30)
    assert taken.returncode == 1
    assert "another process listens" in err.splitlines()[-1]
    early = up(tmp_path)
    assert early.stderr is not None
    assert early.stderr.readline() == "starting the services\n"
    early.send_signal(signal.SIGTERM)
    _, err = early.communicate(timeout=30)
    assert early.returncode == 128 + signal.SIGTERM
    assert err.endswith("stopped before the pool was open; nothing is left\n")
    wait_until(lambda: not marked(str(tmp_path)), "all its processes are gone")
    assert not list(tmp_path.iterdir())


def model_files(folder: Path, weights: bytes) -> Path:
    """A model's files, as far as revisions look at them."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("[]")
    return folder


def test_revisions_follow_the_bytes(tmp_path: Path) -> None:
    """The same bytes in another folder have the same revision; one other bit has another; a hub's snapshot has its
    commit."""
    one, same = model_files(tmp_path / "one", b"weights"), model_files(tmp_path / "same", b"weights")
    other = model_files(tmp_path / "other", b"weightz")
    read: list[int] = []
    assert revisions.weights_revision(one, read.append) == revisions.weights_revision(same)
    assert sum(read) == len(b"weights") + len("{}")
    assert revisions.weights_revision(one) != revisions.weights_revision(other)
    assert revisions.tokenizer_revision(one) == revisions.tokenizer_revision(other) != ""
    snapshot = model_files(tmp_path / "models--m" / "snapshots" / ("a" * 40), b"w")
    assert revisions.weights_revision(snapshot) == revisions.tokenizer_revision(snapshot) == "a" * 40


def test_flags_of_one_shard_name_no_rank() -> None:
    """`up` gives the rank itself."""
    made: Any = plan(ModelShape((LayerGroup(2, 32),), 2, 16, None), Deployment("float32"), 1 << 20)
    assert "--rank" not in compute_flags(made, "w", 0)
    assert compute_flags(made, "w")[-2:] == ["--window-tokens", "32"]
