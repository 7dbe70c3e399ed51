"""Real processes under a seeded schedule of faults, with every byte checked.

    python benchmarks/chaos.py [--quick] [--seconds N] [--seed S] [--logs FOLDER] [--sabotage]

A cache service, two shards, two attached and two remote engines, and a client that misbehaves; docs/reliability.md
says what is injected and what is promised. The same seed gives the same faults in the same order and with the same
gaps; what they meet depends on the machine. JSON keys: `faults`, and zeros where zero is promised: `wrong_bytes`
(outputs that differ from the oracle, and forged work that was accepted), `leaked_blocks`, `stuck_sequences`,
`sealed_blocks_lost`, `crashes` (processes that ended by themselves); `recovery_seconds_median` and `_max` (end of a
fault to a READY pool in which every engine computes), `steps`, `seconds`, `seed`. Exit status 1 unless all are zero.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from _chaos_faults import Faults
from _chaos_prompts import BLOCK_TOKENS
from _chaos_sabotage import Sabotage
from _chaos_schedule import CALM_AFTER, Fault, schedule
from _chaos_watch import LEAK_SECONDS, Prober, Watch
from _chaos_world import NUM_BLOCKS, World
from _machine import describe_machine, finish

START_SECONDS = 120.0
"""The first start on a machine compiles the kernels."""

STUCK_SECONDS = 20.0
"""Of a READY pool, in which every sequence goes on."""

MOST_AT_ONCE = 3


class Run:
    """One chaos run."""

    def __init__(self, seed: int, logs: Path | None) -> None:
        self.problems: list[str] = []
        self.leaked = self.stuck = self.lost = self.crashes = self.calms = self.compared = 0
        self.compared_blocks = 0
        self._told_stuck: set[str] = set()
        self._excess_since: float | None = None
        self.world = World(seed, lambda name, message: self.watch.hear(name, message), logs)
        self.watch = Watch(self.world.address)
        self.faults = Faults(self.world, self.watch)
        self.prober = Prober(self.world.address, seed)
        self.sabotage = Sabotage(self.world)

    def start(self) -> None:
        """Start everything, and wait until every engine computes. Raises `RuntimeError`."""
        for process in self.world.processes:
            self.world.start(process)
        names = list(self.world.engines)
        if not self.until(lambda: self.watch.all_progressed(0.0, names), START_SECONDS) or self.crashes:
            raise RuntimeError(f"not every engine computes: {self.problems or self.watch.turns}")

    def go(self, seconds: float, seed: int) -> None:
        """Inject faults for so long, with a calm now and then and at the end."""
        end = time.monotonic() + seconds
        for fault in schedule(seed, 1 + int(10 * seconds)):
            self.until(lambda: False, fault.gap)
            if time.monotonic() > end - self._rest(seconds):
                break
            if fault.number and fault.number % CALM_AFTER == 0:
                self.calm()
            self.until(partial(self.faults.can_begin, fault, MOST_AT_ONCE), 60.0)
            if fault.kind.endswith("compared"):
                self.kill_and_compare(fault)
            else:
                self.faults.begin(fault)
        self.calm()

    def break_promises(self) -> None:
        """What every check is there for, once."""
        self.sabotage.wanted = True
        self.calm()
        self.kill_and_compare(Fault(0, 0.0, "cache killed, prefixes compared", "cache", 0.2, 0.0))
        self.calm()

    @staticmethod
    def _rest(seconds: float) -> float:
        """Time for the last calm."""
        return min(8.0, seconds / 3)

    # What is done in one go

    def kill_and_compare(self, fault: Fault) -> None:
        """Kill the cache service (and a shard with it) while engines ask for nothing new, and look the prefixes up
        before and after."""
        # Alone: what a shard loses with its own death is no concern of this one.
        self.until(lambda: not self.faults.active and self.watch.ready_since(self.faults.ended_at), 30.0)
        asked, names = time.monotonic(), list(self.world.engines)
        self._tell_all("freeze")
        frozen = self.until(lambda: self.watch.frozen(asked, names), 5.0)
        epoch, before = self.watch.last.epoch, self.prober.published()
        killed = [self.world.cache]
        if "shard" in fault.kind:
            killed.append(self.world.shards[fault.number % len(self.world.shards)])
        for process in killed:
            process.end(kill=True)
        self.until(lambda: not any(process.alive for process in killed), 5.0)
        self.until(lambda: False, fault.seconds)
        self.sabotage.lose_blocks()
        began = time.monotonic()
        for process in killed:
            self.world.start(process)
        self.until(lambda: self.watch.ready_since(began), 30.0)
        after = self.prober.published()
        looked_up = time.monotonic()
        self.until(lambda: self.watch.ready_since(looked_up), 10.0)
        self._tell_all("resume")
        self.faults.count(fault.kind, fault.number, began)
        if before is None or after is None or not frozen:
            return
        self.compared += 1
        self.compared_blocks += len(before)
        evicted = self.watch.last.evicted
        lost = max(0, len(before - after) - evicted)
        if lost:
            self.lost += lost
            self._problem(
                f"{len(before - after)} of {len(before)} blocks are not hit after the kill, {evicted} were evicted; "
                f"epoch {epoch} then {self.watch.last.epoch}"
            )

    def calm(self) -> None:
        """Let everything recover; then every sequence must go on, end when asked to, and leave nothing behind."""
        self.calms += 1
        if not self.until(lambda: not self.faults.active and not self.watch.rogue_busy, 30.0):
            self._problem(f"faults do not end: {list(self.faults.active)}, rogue busy: {self.watch.rogue_busy}")
        began = time.monotonic()
        if not self.until(lambda: self.watch.ready_since(began), STUCK_SECONDS + 20.0):
            self.stuck += 1
            self._problem("the pool is not READY though nothing is wrong with its parts")
            return
        moment, names = time.monotonic(), list(self.world.engines)
        self.sabotage.in_calm()
        if not self.until(
            lambda: self.watch.all_progressed(moment, names) and not self.watch.all_moved(moment, names), STUCK_SECONDS
        ):
            self._stuck([*self.watch.all_moved(moment, names), *self._idle(moment, names)])
        self.faults.settle()
        moment = time.monotonic()
        self._tell_all("drain")
        if not self.until(lambda: not self.watch.drained(moment, names), STUCK_SECONDS):
            self._stuck([f"{name} does not end" for name in self.watch.drained(moment, names)])
        drained = time.monotonic()
        empty = self.until(lambda: self.watch.ready_since(drained) and self.watch.last.in_use == 0, LEAK_SECONDS)
        if not empty:
            self.leaked += self.watch.last.in_use
            self._problem(f"{self.watch.last.in_use} blocks are in use {LEAK_SECONDS:g} s after every engine let go")
        self._tell_all("resume")

    # All the time

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Go on until a condition holds; whether it does within the time."""
        deadline = time.monotonic() + seconds
        while True:
            self._tick()
            if condition():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)

    def _tick(self) -> None:
        self.faults.end_due()
        for process in self.world.processes:
            if process.child is not None and not process.alive and not process.told_to_end:
                self.crashes += 1
                words = [line for line in process.child.lines if line.strip()][-3:]
                self._problem(f"{process.name} ended by itself with {process.child.status}: {words}")
                if process is self.world.rogue:
                    self.watch.rogue_busy = False
                self.world.start(process)
        now = time.monotonic()
        for name, heard in self.watch.engines.items():
            moved_at = heard.moved_at
            if moved_at is not None and self.watch.waited_ready(moved_at) > 2 * STUCK_SECONDS:
                self._stuck([f"{name} {heard.oldest}"])
        self._look_for_excess(now)

    def _look_for_excess(self, now: float) -> None:
        last = self.watch.last
        if self.faults.disturbed or not last.ready or last.in_use <= self.watch.may_hold(now):
            self._excess_since = None
        elif self._excess_since is None:
            self._excess_since = now
        elif now - self._excess_since > LEAK_SECONDS + 0.5:
            excess = last.in_use - self.watch.may_hold(now)
            self.leaked += excess
            self._problem(f"{last.in_use} blocks are in use, {excess} more than engines hold")
            self._excess_since = None

    def _tell_all(self, line: str) -> None:
        for engine in self.world.engines.values():
            self.world.tell(engine, line)

    def _idle(self, moment: float, names: list[str]) -> list[str]:
        return [f"{name} computes nothing" for name in names if not self.watch.all_progressed(moment, [name])]

    def _stuck(self, found: list[str]) -> None:
        for each in found:
            if each not in self._told_stuck:
                self._told_stuck.add(each)
                self.stuck += 1
                self._problem(f"stuck: {each}")

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        print(f"PROBLEM after fault {self.faults.newest}: {text}"[:2000], flush=True)

    def close(self) -> None:
        """End everything."""
        self.sabotage.close()
        self.prober.close()
        self.watch.close()
        self.world.close()


def report(run: Run, seconds: float, seed: int) -> dict[str, object]:
    """Print what happened; returns the figures."""
    for problem in run.watch.wrong:
        print(f"WRONG: {problem}"[:2000])
    for kind, times in sorted(run.faults.survived.items()):
        known = [each for each in times if each is not None]
        figures = f"recovered in median {statistics.median(known):5.2f} s, max {max(known):5.2f} s" if known else ""
        print(f"{kind:<40} {len(times):4}   {figures}")
    counts = run.watch.counts()
    print(
        f"engines: {counts['steps']} steps, {counts['tokens']} tokens computed, {counts['hit_tokens']} hit, "
        f"{counts['outputs']} outputs compared, {counts['forks']} forks, {counts['preempted']} preemptions, "
        f"{counts['cuts']} cuts, {counts['finished']} sequences finished, {counts['sessions']} sessions"
    )
    print(f"attacks: {dict(sorted(run.watch.attacks.items()))}")
    print(f"what engines had to live with: {dict(run.watch.turns.most_common())}")
    print(
        f"{run.calms} calms; {run.compared} kills compared {run.compared_blocks} published blocks of "
        f"{BLOCK_TOKENS} tokens; pool of {NUM_BLOCKS} blocks"
    )
    recovered = [each for times in run.faults.survived.values() for each in times if each is not None]
    return {
        "faults": run.faults.total,
        "wrong_bytes": len(run.watch.wrong),
        "leaked_blocks": run.leaked,
        "stuck_sequences": run.stuck,
        "sealed_blocks_lost": run.lost,
        "crashes": run.crashes,
        "recovery_seconds_median": round(statistics.median(recovered), 3) if recovered else None,
        "recovery_seconds_max": round(max(recovered), 3) if recovered else None,
        "steps": counts["steps"],
        "outputs": counts["outputs"],
        "seconds": round(seconds, 1),
        "seed": seed,
    }


def main() -> int:
    """Run, report; 1 when something happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run of some 25 seconds")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--sabotage", action="store_true", help="no faults: break every promise once, and see that the figures show it"
    )
    parser.add_argument("--logs", type=Path, help="folder for everything that the processes say")
    given = parser.parse_args()
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)
    describe_machine()
    run = Run(given.seed, given.logs)
    begun = time.monotonic()
    try:
        run.start()
        begun = time.monotonic()
        if given.sabotage:
            run.break_promises()
        else:
            run.go(14.0 if given.quick else given.seconds, given.seed)
        seconds = time.monotonic() - begun
    finally:
        run.close()
    figures = report(run, seconds, given.seed)
    finish(figures)
    promised = ("wrong_bytes", "leaked_blocks", "stuck_sequences", "sealed_blocks_lost", "crashes")
    return int(any(Counter({name: figures[name] for name in promised}).values()))


if __name__ == "__main__":
    sys.exit(main())
