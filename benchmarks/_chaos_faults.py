"""How each fault is done and undone, and how long the world takes to recover from it."""

import signal
import time
from collections import defaultdict
from dataclasses import dataclass

from _chaos_schedule import Fault
from _chaos_watch import Watch
from _chaos_world import CutProxy, World

_ATTACKS = {"steps duplicated": "duplicate", "steps reordered": "reorder", "plans replayed": "replay"}
_GIVE_UP_SECONDS = 30.0
"""After which a killed or asked part that did not end is killed again."""


@dataclass
class Active:
    """A fault that is under way."""

    fault: Fault
    due: float
    """When it ends."""


@dataclass
class Ended:
    """A fault whose recovery is waited for."""

    kind: str
    at: float
    place: int
    """In the list of its kind."""


class Faults:
    """Begins and ends faults on a world."""

    def __init__(self, world: World, watch: Watch) -> None:
        self._world, self._watch = world, watch
        self.active: dict[str, Active] = {}
        """By target: one at a time."""
        self.survived: dict[str, list[float | None]] = defaultdict(list)
        """By kind: seconds until all was well again, None when that was not seen."""
        self.ended_at = time.monotonic()
        self.newest = ""
        self._services_at = time.monotonic()
        self._recovering: list[Ended] = []

    @property
    def total(self) -> int:
        """Faults injected."""
        return sum(map(len, self.survived.values()))

    @property
    def disturbed(self) -> bool:
        """Whether a service is hurt, or its way to another."""
        named = any(not each.fault.kind.startswith("engine killed") for each in self.active.values())
        return named or time.monotonic() - self._services_at < 0.5

    def can_begin(self, fault: Fault, most: int) -> bool:
        """Whether the target is whole, and little else is hurt."""
        if fault.target in self.active or len(self.active) >= most:
            return False
        return not (fault.target == "rogue" and self._watch.rogue_busy)

    def count(self, kind: str, number: int, at: float) -> None:
        """A fault that was done elsewhere, and was over at a time."""
        self.newest = f"{number} ({kind})"
        print(f"{at:.1f} {self.newest}", flush=True)
        self._over(kind, at)

    def begin(self, fault: Fault) -> None:
        """Do it. What has a duration ends by `end_due`."""
        world, kind, target = self._world, fault.kind, fault.target
        self.newest = f"{fault.number} ({kind}, {target}, {fault.seconds:.1f} s)"
        print(f"{time.monotonic():.1f} {self.newest}", flush=True)
        process = world.find(target)
        if kind.endswith(("killed", "restarted")):
            process.end(kill=kind.endswith("killed"))
        elif " stopped" in kind:
            process.signal(signal.SIGSTOP)
        elif " cut from " in kind:
            self._way(fault).cut()
        elif " unheard " in kind:
            self._way(fault).hold()
            if kind.endswith("gives up"):
                world.tell(process, "forget")
        elif " far " in kind:
            self._way(fault).delay_seconds = fault.delay_seconds
        elif kind == "engine silent beyond the ttl":
            world.tell(process, f"rest {fault.seconds:.2f}")
        elif kind == "pool full":
            world.tell(process, f"hog {fault.seconds:.2f}")
        else:
            self._watch.rogue_busy = True
            world.tell(process, f"arenas {fault.seconds:.2f}" if kind == "arenas full" else _ATTACKS[kind])
        self.active[target] = Active(fault, time.monotonic() + fault.seconds)

    def end_due(self) -> None:
        """Undo what has lasted long enough, and see who has recovered."""
        now = time.monotonic()
        for target, active in list(self.active.items()):
            if now >= active.due and self._undone(active, now):
                del self.active[target]
                self._over(active.fault.kind)
        names = [name for name in self._world.engines if name not in self.active]
        for ended in list(self._recovering):
            if self._watch.ready_since(ended.at) and self._watch.all_progressed(ended.at, names):
                self.survived[ended.kind][ended.place] = time.monotonic() - ended.at
                self._recovering.remove(ended)

    def settle(self) -> None:
        """What has not recovered by now is not waited for."""
        self._recovering.clear()

    def _undone(self, active: Active, now: float) -> bool:
        world, fault = self._world, active.fault
        process = world.find(fault.target)
        if fault.kind.endswith(("killed", "restarted")):
            if process.alive:
                if now > active.due + _GIVE_UP_SECONDS:
                    process.end(kill=True)
                return False
            world.start(process)
        elif " stopped" in fault.kind:
            process.signal(signal.SIGCONT)
        elif " unheard " in fault.kind:
            if fault.kind.endswith("gives up"):
                self._way(fault).cut()  # what it sent to end its session never arrives
            self._way(fault).release()
        elif " far " in fault.kind:
            self._way(fault).delay_seconds = 0.0
        elif fault.target == "rogue":
            return not self._watch.rogue_busy
        return True

    def _way(self, fault: Fault) -> CutProxy:
        return (self._world.to_shard if fault.kind.endswith("engines") else self._world.to_cache)[fault.target]

    def _over(self, kind: str, at: float | None = None) -> None:
        self.ended_at = time.monotonic() if at is None else at
        if not kind.startswith("engine"):
            self._services_at = self.ended_at
        times = self.survived[kind]
        self._recovering.append(Ended(kind, self.ended_at, len(times)))
        times.append(None)
