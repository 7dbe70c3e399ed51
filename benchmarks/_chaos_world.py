"""The processes of a chaos run and the connections between them, each of which can be hurt and mended.

    engine --proxy--> cache service <--proxy-- shard,   remote engine --proxy--> shard

Every engine and every shard has a proxy of its own before the cache service, and every shard one before itself.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _chaos_oracle import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS
from _chaos_prompts import BLOCK_TOKENS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cut_proxy import CutProxy
from kvplane.cli.child import Child

__all__ = ["ENGINES", "NUM_BLOCKS", "NUM_SHARDS", "TTL_SECONDS", "CutProxy", "Process", "World"]

HERE = Path(__file__).parent
NUM_SHARDS = 2
NUM_BLOCKS = 192
TTL_SECONDS = 3.0
SHARD_TTL_SECONDS = 6.0
ARENA_BYTES = 12 << 20
ENGINES = {
    "attached-0": ("attached", "auto"),
    "attached-1": ("attached", "auto"),
    "remote-shm": ("remote", "auto"),
    "remote-inline": ("remote", "inline"),
}
_LOGS = ("--log-format", "json", "--log-level", "info", "--metrics-address", "")

Hear = Callable[[str, dict[str, Any]], None]
"""Called with a child's name and what it said, on a thread of its own."""


@dataclass
class Process:
    """One part of the world: a process that is started again under the same name."""

    name: str
    child: Child | None = None
    lives: int = 0
    told_to_end: bool = False
    """Whether the end of the running one is ours."""
    stopped: bool = False
    lines: list[str] = field(default_factory=list)
    """The last words of the one before."""

    @property
    def alive(self) -> bool:
        """Whether it runs, stopped or not."""
        return self.child is not None and self.child.alive

    def signal(self, number: int) -> None:
        """Send a signal to the running one."""
        assert self.child is not None
        self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)
        with suppress(ProcessLookupError):
            os.kill(self.child.pid, number)

    def end(self, *, kill: bool) -> None:
        """Tell it to end; returns at once."""
        self.told_to_end = True
        if self.stopped:
            self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL if kill else signal.SIGTERM)


class World:
    """Starts and ends everything. Use it from the main thread: the kernel kills children of a thread that ends."""

    def __init__(self, seed: int, hear: Hear, keep_logs: Path | None = None) -> None:
        self._seed, self._hear = seed, hear
        token = secrets.token_hex(6)
        self.folder = Path(tempfile.gettempdir()) / f"kvplane-chaos-{token}"
        self.memory = Path("/dev/shm") / f"kvplane-chaos-{token}"
        self.logs = keep_logs
        self._janitor = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "kvplane.cli.janitor", str(os.getpid())),
                str(self.folder),
                str(self.memory),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for folder in (self.folder, self.memory):
            folder.mkdir(mode=0o700)
        self.address = f"unix:{self.folder / 'cache.sock'}"
        self.cache = Process("cache")
        self.shards = [Process(f"shard-{rank}") for rank in range(NUM_SHARDS)]
        self.engines = {name: Process(name) for name in ENGINES}
        self.rogue = Process("rogue")
        self.to_cache = {name: CutProxy(self.address) for name in (*ENGINES, *(each.name for each in self.shards))}
        """Ways to the cache service, by who takes them."""
        self.to_shard = {
            each.name: CutProxy(str(self.folder / f"compute-{rank}.sock")) for rank, each in enumerate(self.shards)
        }
        """Ways of remote engines to shards."""

    @property
    def processes(self) -> list[Process]:
        """All parts."""
        return [self.cache, *self.shards, *self.engines.values(), self.rogue]

    def find(self, name: str) -> Process:
        """A part by its name."""
        return next(each for each in self.processes if each.name == name)

    def start(self, process: Process) -> None:
        """Start a part whose last process has ended."""
        if process.child is not None:
            process.lines = process.child.lines
            process.child.close()
        process.told_to_end = process.stopped = False
        process.lives += 1
        if process is self.cache:
            process.child = self._service(process, "kvplane.cache", ["--listen", self.address, *_LOGS, *self._cache()])
        elif process in self.shards:
            process.child = self._service(process, "kvplane.compute", self._shard(process))
        else:
            module, arguments = self._program(process)
            way = self.address if process is self.rogue else self.to_cache[process.name].address
            process.child = Child(
                process.name, module, arguments, pipes=True, on_line=self._log, environment=_sources(way)
            )
            reader = threading.Thread(target=self._read, args=(process.name, process.child), daemon=True)
            reader.start()

    def tell(self, process: Process, line: str) -> None:
        """A line of standard input; a process that is gone hears nothing."""
        if process.child is not None:
            with suppress(BrokenPipeError, ValueError):
                process.child.stdin.write(line + "\n")
                process.child.stdin.flush()

    def close(self) -> None:
        """End everything, engines first, and remove what is left."""
        for process in reversed(self.processes):
            if process.alive:
                process.end(kill=process is self.rogue or process.name in self.engines)
        for process in reversed(self.processes):
            if process.child is not None:
                process.child.stop()
                process.child.close()
        for proxy in (*self.to_cache.values(), *self.to_shard.values()):
            proxy.close()
        for folder in (self.folder, self.memory):
            shutil.rmtree(folder, ignore_errors=True)
        self._janitor.kill()
        self._janitor.wait()

    def _service(self, process: Process, module: str, arguments: list[str]) -> Child:
        return Child(process.name, module, arguments, on_line=self._log)

    def _cache(self) -> list[str]:
        return ["--shard-ttl-seconds", str(SHARD_TTL_SECONDS), "--drain-seconds", "1"]

    def _shard(self, process: Process) -> list[str]:
        rank = self.shards.index(process)
        return [
            *("--listen", f"unix:{self.folder / f'compute-{rank}.sock'}"),
            *("--advertise", self.to_shard[process.name].address),
            *("--attach-socket", str(self.folder / f"attach-{rank}.sock")),
            *("--cache", self.to_cache[process.name].address, "--pool-id", "default", "--rank", str(rank)),
            *("--memory-folder", str(self.memory), *_LOGS, "--threads", "1", "--drain-seconds", "1"),
            *("--weights-revision", "chaos", "--kv-dtype", "float32", "--num-layers", str(NUM_LAYERS)),
            *("--num-kv-heads", str(NUM_KV_HEADS), "--head-dim", str(HEAD_DIM), "--block-tokens", str(BLOCK_TOKENS)),
            *("--max-blocks", str(NUM_BLOCKS), "--pool-bytes", str(1 << 26), "--arena-bytes", str(ARENA_BYTES)),
            *("--tensor-parallel", str(NUM_SHARDS), "--ttl-seconds", str(SHARD_TTL_SECONDS)),
        ]

    def _program(self, process: Process) -> tuple[str, list[str]]:
        if process is self.rogue:
            return "_chaos_rogue", [str(TTL_SECONDS), str(self._seed * 100 + process.lives)]
        mode, transport = ENGINES[process.name]
        life = self._seed * 10_000 + 100 * list(ENGINES).index(process.name) + process.lives
        return "_chaos_engine", [process.name, mode, transport, str(TTL_SECONDS), str(self._seed), str(life)]

    def _read(self, name: str, child: Child) -> None:
        with suppress(ValueError):  # closed under the reader
            for line in child.stdout:
                try:
                    message = json.loads(line)
                except ValueError:
                    continue  # cut off by a kill
                self._hear(name, message)
                if message["kind"] != "progress":
                    self._log(name, line.rstrip())

    def _log(self, name: str, line: str) -> None:
        if self.logs is not None:
            with (self.logs / f"{name}.log").open("a") as file:
                file.write(f"{time.monotonic():.3f} {line}\n")


def _sources(address: str) -> Mapping[str, str]:
    """Environment of an engine: it finds the modules beside this one."""
    path = os.environ.get("PYTHONPATH", "")
    return {
        "KVPLANE_ADDRESS": address,
        "PYTHONPATH": f"{HERE}{os.pathsep}{path}" if path else str(HERE),
        "OMP_WAIT_POLICY": "passive",
    }
