"""Attached processes: who they are, their hold maps, and how their end is seen.

A process is held by its pidfd, so that an id that is used again is never taken for it. Its row in the directory and its
hold map outlive this service: whoever takes the memory up finds the process again, or finds it gone.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvplane.compute import memory
from kvplane.compute.memory import SharedMemory
from kvplane.compute.pool import Pool
from kvplane.v1 import registry_pb2
from kvplane.wire import stamps
from kvplane.wire import tables as directory_tables
from kvplane.wire.errors import PreconditionError

_START_TICKS_FIELD = 19
"""Index of the start time among the fields of /proc/PID/stat that follow the command's name."""


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot. Raises `OSError` when it is gone."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[_START_TICKS_FIELD])


@dataclass(slots=True, eq=False)
class Process:
    """One process that has mapped the pool."""

    session_id: int
    lease_epoch: int
    pid: int
    start_ticks: int
    rank: int
    pidfd: int | None
    """None: it was gone when the memory was taken up again."""
    hold_map: SharedMemory
    number: int
    """Names its hold map."""
    drained_epoch: int = 0
    """Newest lease that it launches nothing more under; used on the event loop."""
    said_drained: bool = False
    """It said so itself; once its connection is closed, that holds for every lease."""

    @property
    def reference(self) -> registry_pb2.ProcessRef:
        """As the wire names it."""
        return registry_pb2.ProcessRef(pid=self.pid, start_ticks=self.start_ticks, rank=self.rank)

    def bits(self) -> npt.NDArray[np.uint8]:
        """Blocks that it may still touch, a bit each."""
        return stamps.open_hold_map(self.hold_map.buffer)


def pidfd_of(pid: int, ticks: int) -> int | None:
    """A descriptor of the process with this start time; None when it is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        same = start_ticks(pid) == ticks
    except OSError:
        same = False
    if not same:
        os.close(descriptor)
        return None
    return descriptor


class Processes:
    """The process table of a pool. Used on the device thread alone, except for reading."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        self._rows = pool.directory.processes
        self._processes: dict[int, Process] = {}
        self.released: list[Process] = []
        """Those of a pool that was given up; their pidfds are open."""
        for index in directory_tables.used(self._rows):
            self._reopen(index)

    def all(self) -> list[Process]:
        """Every process that is not known to be forgotten."""
        return list(self._processes.values())

    def some(self) -> bool:
        """Whether any process has, or had, the memory."""
        return bool(self._processes)

    def of_session(self, session_id: int) -> list[Process]:
        """The processes of a session."""
        return [each for each in self._processes.values() if each.session_id == session_id]

    def attach(self, session_id: int, lease_epoch: int, pid: int, rank: int) -> Process:
        """Begin to hold a process. Raises `PreconditionError` when it is gone already, `LimitExceededError` when the
        table is full or there is no memory for its hold map."""
        try:
            ticks = start_ticks(pid)
        except OSError as error:
            raise PreconditionError(f"process {pid} is not visible here", reason="PID_NAMESPACE_HIDDEN") from error
        pidfd = pidfd_of(pid, ticks)
        if pidfd is None:
            raise PreconditionError(f"process {pid} is gone", reason="PROCESS_GONE")
        number = max(self._processes, default=0) + 1
        hold_map: SharedMemory | None = None
        try:
            hold_map = memory.create(self._path(number), stamps.hold_map_bytes(self._pool.num_blocks))
            owner = stamps.HoldMapOwner(session_id, lease_epoch, pid, ticks, rank)
            stamps.format_hold_map(hold_map.buffer, self._pool.num_blocks, owner)
            directory_tables.add(
                self._rows,
                "processes",
                rank=rank,
                session_id=session_id,
                lease_epoch=lease_epoch,
                start_ticks=ticks,
                pid=pid,
                hold_map=number,
            )
        except Exception:
            os.close(pidfd)
            if hold_map is not None:
                hold_map.unlink()
                hold_map.close()
            raise
        process = Process(session_id, lease_epoch, pid, ticks, rank, pidfd, hold_map, number)
        self._processes[number] = process
        return process

    def remove(self, process: Process) -> None:
        """Forget a process whose end the control plane knows."""
        if self._processes.pop(process.number, None) is None:
            return
        index = directory_tables.find(self._rows, hold_map=process.number, pid=process.pid)
        if index is not None:
            directory_tables.remove(self._rows, index)
        process.hold_map.unlink()
        process.hold_map.close()
        if process.pidfd is not None:
            os.close(process.pidfd)

    def release(self) -> None:
        """Give all hold maps up, with the pool. Those who have mapped theirs keep it."""
        for process in self._processes.values():
            process.hold_map.unlink()
            process.hold_map.close()
        # Their ends may still be watched on the event loop, which closes the descriptors of that.
        self.released.extend(self._processes.values())
        self._processes.clear()

    def find(self, reference: registry_pb2.ProcessRef, session_id: int) -> Process | None:
        """The process that the wire names."""
        for each in self._processes.values():
            if each.session_id == session_id and each.reference == reference:
                return each
        return None

    def _reopen(self, index: int) -> None:
        row = self._rows[index]
        number = int(row["hold_map"])
        hold_map: SharedMemory | None = None
        try:
            hold_map = memory.reopen(self._path(number))
            stamps.open_hold_map(hold_map.buffer)
        except (OSError, ValueError):
            # Without its map nobody could say what it touches; the row was being taken out when its writer died.
            directory_tables.remove(self._rows, index)
            if hold_map is not None:
                hold_map.close()
            return
        pid, ticks = int(row["pid"]), int(row["start_ticks"])
        self._processes[number] = Process(
            int(row["session_id"]),
            int(row["lease_epoch"]),
            pid,
            ticks,
            int(row["rank"]),
            pidfd_of(pid, ticks),
            hold_map,
            number,
        )

    def _path(self, number: int) -> Path:
        return self._folder / f"hold-{number}"
