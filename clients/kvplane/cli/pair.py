"""A cache service and the compute services of one pool, as children of this process. Made by `running_pair`."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from kvplane.cli.child import STOP_SECONDS, Child, OnLine
from kvplane.cli.connection import health_stub
from kvplane.cli.interrupts import Interrupts
from kvplane.cli.logs import event_of, last_warning, last_words
from kvplane.client.control import GrpcCacheControl, connect
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire.errors import DeadlineExceededError, KvplaneError, UnavailableError

READY_SECONDS = 120.0
"""How long a pool may take to open: the first start on a machine compiles the kernels."""

SHARED_MEMORY = Path("/dev/shm")

_CACHE_SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name

_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket (`sun_path` without its end)."""

_LOGS = ("--log-format", "json", "--log-level", "info")
"""The form of logs that is read here."""

_POLL_SECONDS = 0.1

OnProgress = Callable[[str], None]
"""Called with what is being waited for, whenever that changes."""


class RunningPair:
    """A cache service and the compute services of one pool. Made by `running_pair`.

    Start children from the main thread: the kernel kills them when the thread that started them ends.
    """

    def __init__(
        self,
        compute: Sequence[str],
        num_shards: int,
        address: str | None,
        pool_id: str,
        memory_folder: Path | None,
        cache: Sequence[str],
        environment: Mapping[str, str],
        on_line: OnLine | None,
        on_progress: OnProgress | None,
        interrupts: Interrupts,
    ) -> None:
        token = secrets.token_hex(6)
        self.pool_id = pool_id
        self.runtime_folder = _socket_base() / f"kvplane-{token}"
        """Sockets; removed at the end."""
        self.memory_folder = memory_folder or SHARED_MEMORY / f"kvplane-{token}"
        """The pool's memory; removed at the end unless the caller named it."""
        self.address = address or f"unix:{self.runtime_folder / 'cache.sock'}"
        """gRPC address of the cache service."""
        self.computes: list[Child] = []
        """Compute services by rank."""
        self._num_shards = num_shards
        self._folders = [self.runtime_folder] + ([] if memory_folder else [self.memory_folder])
        self._compute_flags = list(compute)
        self._cache_flags = list(cache)
        self._environment = environment
        self._on_line = on_line
        self._on_progress = on_progress
        self._progress = ""
        self._interrupts = interrupts
        self._janitor: subprocess.Popen[bytes] | None = None
        self._cache: Child | None = None
        self._others: list[Child] = []
        self._listening: dict[Child, threading.Event] = {}
        self._closed = False

    # What runs

    @property
    def cache(self) -> Child:
        """The cache service."""
        assert self._cache is not None
        return self._cache

    @property
    def children(self) -> list[Child]:
        """Everything that was started and not replaced, in order of start."""
        return [*([self._cache] if self._cache else []), *self.computes, *self._others]

    @property
    def pids(self) -> list[int]:
        """Process ids of `children` and of the janitor."""
        return [child.pid for child in self.children] + ([self._janitor.pid] if self._janitor else [])

    def start(self) -> None:
        """Start everything; returns before the pool is open."""
        self._say("starting the services")
        with self._interrupts.shield():
            # The janitor first: from here on nothing stays, whatever ends this process.
            self._janitor = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "kvplane.cli.janitor", str(os.getpid())),
                    *(str(folder) for folder in self._folders),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for folder in self._folders:
                folder.mkdir(mode=0o700)
        self.start_cache()
        for rank in range(self._num_shards):
            self.start_compute(rank)

    def start_cache(self) -> Child:
        """Start the cache service, whose last one has ended, at `address`."""
        key = str(self.runtime_folder / "cache.key")
        arguments = ["--listen", self.address, "--key-file", key, "--metrics-address", "", *_LOGS, *self._cache_flags]
        with self._interrupts.shield():
            self._cache = self._child("cache", "kvplane.cache", arguments)
        return self._cache

    def start_compute(self, rank: int) -> Child:
        """Start the compute service of a rank, whose last one has ended."""
        folder = self.runtime_folder
        arguments = [
            *("--listen", f"unix:{folder / f'compute-{rank}.sock'}"),
            *("--attach-socket", str(folder / f"attach-{rank}.sock")),
            *("--cache", self.address, "--pool-id", self.pool_id, "--rank", str(rank)),
            *("--memory-folder", str(self.memory_folder), "--metrics-address", "", *_LOGS),
            *self._compute_flags,
        ]
        with self._interrupts.shield():
            child = self._child(f"compute-{rank}", "kvplane.compute", arguments)
            self.computes[rank : rank + 1] = [child]
        return child

    def spawn(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        pipes: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `python -m module` as one more child, an engine for example. It finds the cache service by
        KVPLANE_ADDRESS, and is stopped before the services at the end."""
        with self._interrupts.shield():
            given = {"KVPLANE_ADDRESS": self.address, **(environment or {})}
            child = self._child(name, module, arguments, pipes=pipes, environment=given)
            self._others.append(child)
        return child

    def restart_cache(self, *, kill: bool = False, wait_seconds: float | None = READY_SECONDS) -> Child:
        """End the cache service, with SIGKILL if `kill`, start the next one at the same address, and wait until the
        pool is READY again (None: do not wait)."""
        _end(self.cache, kill)
        child = self.start_cache()
        if wait_seconds is not None:
            self.wait_ready(wait_seconds)
        return child

    def restart_compute(self, rank: int, *, kill: bool = False, wait_seconds: float | None = READY_SECONDS) -> Child:
        """The same for a compute service; the next one finds the memory of the last."""
        _end(self.computes[rank], kill)
        child = self.start_compute(rank)
        if wait_seconds is not None:
            self.wait_ready(wait_seconds)
        return child

    # The pool

    def pool(self, timeout_seconds: float = 2.0) -> types_pb2.Pool:
        """The pool as the cache service describes it. Raises `KvplaneError`: nobody there, no such pool yet."""
        with connect(self.address) as channel:
            request = cache_pb2.GetPoolRequest(pool_id=self.pool_id)
            return GrpcCacheControl(channel, timeout_seconds).get_pool(request).pool

    def wait_ready(self, seconds: float = READY_SECONDS) -> types_pb2.Pool:
        """Wait until every shard is connected and the pool READY.

        Raises `UnavailableError` with the last line of a service that ended, `DeadlineExceededError` with the last
        warning of a compute service.
        """
        deadline = time.monotonic() + seconds
        # The children's own words first: asking every 0.1 s would fill the cache service's log.
        for child in (self.cache, *self.computes):
            self._wait(self._listening[child].is_set, f"waiting for {child.name}", deadline)
        found: list[types_pb2.Pool] = []

        def ready() -> bool:
            # The health service first: a pool that is not there yet would be logged at every question.
            if not self._serves():
                return False
            try:
                found.append(self.pool())
            except KvplaneError:
                return False
            pool = found[-1]
            connected = sum(shard.connected for shard in pool.shards)
            return pool.state == types_pb2.POOL_STATE_READY and connected == self._num_shards

        self._wait(ready, f"waiting until pool {self.pool_id} is READY", deadline)
        self._say("")
        return found[-1]

    def _serves(self) -> bool:
        """Whether the cache service has an open pool."""
        request = health_pb2.HealthCheckRequest(service=_CACHE_SERVICE)
        try:
            with connect(self.address) as channel:
                answer = health_stub(channel).Check(request, timeout=2.0)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _wait(self, condition: Callable[[], bool], what: str, deadline: float) -> None:
        self._say(what)
        while not condition():
            for child in (self.cache, *self.computes):
                if not child.alive:
                    raise UnavailableError(
                        f"{child.name} ended with status {child.status}: {last_words(child.lines)}",
                        reason="CHILD_ENDED",
                        metadata={"child": child.name},
                    )
            if time.monotonic() > deadline:
                warnings = [text for child in self.computes if (text := last_warning(child.name, child.lines))]
                raise DeadlineExceededError(f"{what}: not in time{''.join(f'; {text}' for text in warnings)}")
            time.sleep(_POLL_SECONDS)

    def _say(self, what: str) -> None:
        if what != self._progress and self._on_progress is not None:
            self._on_progress(what)
        self._progress = what

    # The end

    def close(self, grace_seconds: float = STOP_SECONDS) -> None:
        """Stop what `spawn` started, then the compute services, then the cache service; remove the folders. A signal
        meanwhile makes it SIGKILL. Calling it twice does nothing."""
        if self._closed:
            return
        self._interrupts.close()
        seen = self._interrupts.count
        with ExitStack() as rest:
            rest.callback(self._end_janitor)
            for folder in self._folders:
                rest.callback(shutil.rmtree, folder, ignore_errors=True)
            self._say("stopping")
            for stage in (self._others, self.computes, [self._cache] if self._cache else []):
                for child in reversed(stage):
                    child.terminate()
                for child in reversed(stage):
                    child.stop(grace_seconds, lambda: self._interrupts.count > seen)
                    child.close()
        self._closed = True
        self._say("")

    def _end_janitor(self) -> None:
        if self._janitor is not None:
            self._janitor.send_signal(signal.SIGKILL)
            self._janitor.wait()

    def _child(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        pipes: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        together = {**self._environment, **(environment or {})}
        listening = threading.Event()

        def on_line(name: str, line: str) -> None:
            if not listening.is_set() and event_of(line).get("event") == "listening":
                listening.set()
            if self._on_line is not None:
                self._on_line(name, line)

        child = Child(name, module, arguments, on_line=on_line, pipes=pipes, environment=together)
        self._listening[child] = listening
        return child


def _end(child: Child, kill: bool) -> None:
    if kill:
        child.kill()
    else:
        child.stop()
    child.close()


def _socket_base() -> Path:
    """The temporary folder, or /tmp when sockets in it would have too long a path."""
    base = Path(tempfile.gettempdir())
    longest = base / f"kvplane-{secrets.token_hex(6)}" / "compute-255.sock"
    return base if len(os.fsencode(longest)) <= _SOCKET_PATH_BYTES else Path("/tmp")
