"""Random work with crashes of the control plane at random points, against a memory that remembers who wrote what.

The truth is independent of the core: a slot's content is named by the tokens up to it, shards are directory rows and
stamps, engines write and scribble as devices do. Whatever happens, a committed token reads its own content, no
generation comes twice, no block gets a new occupant while somebody may touch it, and nothing that is sealed everywhere
is lost.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kvplane.cache.core import (
    Admit,
    CacheCore,
    CoreConfig,
    CutReason,
    Declaration,
    Declared,
    Finish,
    Fork,
    Lengths,
    Observe,
    SequenceState,
    Step,
    StepResult,
    TransferAck,
)
from kvplane.cache.service.inventories import Upload, survivors
from kvplane.wire import directory
from kvplane.wire.identity import ModelIdentity

SIZE, NUM_BLOCKS, NUM_SHARDS, NUM_ENGINES = 4, 28, 2, 3
MODEL = ModelIdentity("w", "t", "bfloat16", SIZE)
Block = tuple[int, int]


def u64s(values: list[int]) -> Any:
    return np.array(values, np.uint64)


def u32s(values: list[int]) -> Any:
    return np.array(values, np.uint32)


@dataclass
class Held:
    """A sequence of an engine."""

    tokens: list[int]
    committed: int = 0
    table: list[Block] = field(default_factory=list)
    running: bool = False
    drains: bool = False
    """It was revoked, and the engine has not said that it is drained."""


@dataclass
class Released:
    """Blocks that an engine has let go of and may write behind `committed` until `step` has completed."""

    step: int
    committed: int
    table: list[Block]


@dataclass
class Engine:
    """One session's engine. It acts on every answer, except those that a crash takes away."""

    session_id: int
    held: dict[int, Held] = field(default_factory=dict)
    released: list[Released] = field(default_factory=list)
    step_id: int = 0
    seen: int = 0
    completed: int = 0
    serial: int = 0
    copied: list[int] = field(default_factory=list)
    drained: list[int] = field(default_factory=list)
    lost: tuple[Step, StepResult] | None = None
    """An answer that is still on its way."""

    def hold_map(self) -> set[int]:
        """Blocks that it may touch."""
        named = [each.table for each in self.held.values()] + [each.table for each in self.released]
        return {block for table in named for block, _ in table}


class World:
    """The pool's memory, its shards, its engines and one control plane at a time."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.memory: list[list[Any]] = [[None] * SIZE for _ in range(NUM_BLOCKS)]
        self.shards = [Upload(NUM_BLOCKS) for _ in range(NUM_SHARDS)]
        self.newest: dict[int, int] = {}
        self.incarnation, self.now = 1, 0.0
        self.engines: list[Engine] = []
        self.zombies: list[Engine] = []
        """Engines whose leases are over and whose work may still run."""
        self.crashes = self.kept = self.cut = 0
        self.core = self._core()
        for number in range(NUM_ENGINES):
            self._open(number + 1)

    def _core(self) -> CacheCore:
        return CacheCore(CoreConfig(NUM_BLOCKS, MODEL, self.incarnation, watermark=0.0))

    def _open(self, session_id: int) -> None:
        self.core.open_session(self.now, 8, 300.0, session_id)
        self.engines.append(Engine(session_id))

    # What engines do

    def act(self, engine: Engine) -> None:
        """One step with random operations, answered, or with its answer under way when the crash comes."""
        self.deliver(engine)
        random, operations = self.random, dict[str, Any]()
        idle = [number for number, each in engine.held.items() if not each.running and not each.drains]
        running = [number for number, each in engine.held.items() if each.running]
        choice = random.random()
        if choice < 0.3 and len(engine.held) < 7:
            engine.serial += 1
            row = next(row for row in range(8) if all(number & 0xFF != row for number in engine.held))
            number = engine.serial << 32 | row
            prefix = random.choice(([1] * 8, [1] * 5 + [2] * 7, [3] * 12, []))
            tokens = prefix + [random.randrange(9) for _ in range(random.randrange(1, 9))]
            engine.held[number] = Held(tokens)
            operations["admit"] = (Admit(number, np.array(tokens, "<u4").tobytes(), write_cache=random.random() < 0.9),)
        elif choice < 0.4 and idle:
            operations["admit"] = (Admit(random.choice(idle)),)
        elif choice < 0.55 and engine.held:
            number = random.choice(list(engine.held))
            if not engine.held[number].drains:
                operations["finish"] = Finish(u64s([number]), u32s([1]))
        elif choice < 0.65 and running and len(engine.held) < 7:
            engine.serial += 1
            row = next(row for row in range(8) if all(number & 0xFF != row for number in engine.held))
            parent, child = random.choice(running), engine.serial << 32 | row
            operations["forks"] = (Fork(parent, (child,)),)
        elif running:
            chosen = [number for number in running if random.random() < 0.7]
            commits = [
                number for number in chosen if len(engine.held[number].table) * SIZE >= len(engine.held[number].tokens)
            ]
            if commits:
                for number in commits:
                    self.write(engine.held[number])
                operations["commit"] = Lengths(
                    u64s(commits), u32s([engine.held[number].committed for number in commits])
                )
                for number in commits:
                    engine.held[number].tokens.append(random.randrange(9))
                operations["observe"] = Observe(
                    u64s(commits),
                    u32s([1] * len(commits)),
                    u32s([engine.held[number].tokens[-1] for number in commits]),
                )
                operations["commit"] = Lengths(
                    u64s(commits), u32s([engine.held[number].committed for number in commits])
                )
            if chosen:
                slots = [len(engine.held[number].tokens) + random.randrange(6) for number in chosen]
                operations["extend"] = Lengths(u64s(chosen), u32s(slots))
        engine.step_id += 1
        if random.random() < 0.7:
            engine.completed = random.randint(engine.completed, engine.step_id - 1)
            engine.released = [each for each in engine.released if each.step > engine.completed]
        step = Step(
            engine.step_id,
            engine.seen,
            engine.completed,
            transfers=tuple(TransferAck(op) for op in engine.copied),
            drained=tuple(engine.drained),
            **operations,
        )
        for number in engine.drained:
            if number in engine.held:
                engine.held[number].drains = False
            engine.released = [each for each in engine.released if each.step < 1 << 61 or each.committed != number]
        engine.copied, engine.drained = [], []
        result = self.core.step(engine.session_id, step, self.now)
        self._generations(result)
        engine.lost = (step, result)
        for preemption in result.preemptions:
            if preemption.session_id != engine.session_id:
                self.revoke(preemption.session_id, preemption.sequence_id)
        if random.random() < 0.8:
            self.deliver(engine)

    def revoke(self, session_id: int, number: int) -> None:
        """A notice arrives at once; that its work is over is said with a later step."""
        victim = next(each for each in self.engines if each.session_id == session_id)
        self.deliver(victim)
        gone = victim.held[number]
        # `committed` tells such releases apart by their sequence; nothing is scribbled on them.
        victim.released.append(Released(1 << 62, number, list(gone.table)))
        gone.table, gone.running, gone.committed, gone.drains = [], False, 0, True
        victim.drained.append(number)

    def deliver(self, engine: Engine) -> None:
        """The answer arrives: tables grow, and what it asks for is launched."""
        if engine.lost is None:
            return
        (step, result), engine.lost = engine.lost, None
        engine.seen = step.step_id
        running = {each.sequence_id for each in result.states if each.state == SequenceState.RUNNING}
        for fork in step.forks:
            for child in fork.child_ids:
                parent = engine.held[fork.parent_id]
                engine.held[child] = Held(list(parent.tokens), parent.committed if child in running else 0)
        for tables in result.tables:
            at = 0
            for number, start, count in zip(
                tables.sequence_ids.tolist(), tables.starts.tolist(), tables.counts.tolist(), strict=True
            ):
                blocks = zip(
                    tables.block_ids[at : at + count].tolist(),
                    tables.generations[at : at + count].tolist(),
                    strict=True,
                )
                at += count
                if number in engine.held:
                    held = engine.held[number]
                    held.table[start:] = list(blocks)
                    held.running = True
        for admission in result.admissions:
            engine.held[admission.sequence_id].committed = admission.cached_tokens
        for each in result.states:
            gone = engine.held.get(each.sequence_id)
            if gone is not None and each.state in (SequenceState.PREEMPTED, SequenceState.FINISHED):
                if gone.table:
                    engine.released.append(Released(step.step_id - 1, gone.committed, gone.table))
                gone.table, gone.running, gone.committed = [], False, 0
                if each.state == SequenceState.FINISHED:
                    del engine.held[each.sequence_id]
        for held in engine.held.values():
            if self.random.random() < 0.6:
                self.stamp(held.table)
        mine = {block for held in engine.held.values() for block in held.table}
        for copy in result.copies:
            if (copy.destination_id, copy.destination_generation) not in mine:
                continue
            self.stamp([(copy.destination_id, copy.destination_generation)])
            source = self.memory[copy.source_id][: copy.num_slots]
            self.memory[copy.destination_id][: copy.num_slots] = source
            engine.copied.append(copy.op_id)
        engine.released = [each for each in engine.released if each.step > engine.completed]

    def stamp(self, table: list[Block]) -> None:
        """Before anything is launched on a block; an older incarnation's generation is refused by every shard."""
        for block, generation in table:
            if generation >> 32 >= self.incarnation:
                for shard in self.shards:
                    assert shard.stamps[block] <= generation, f"I9: block {block} was given away"
                    shard.stamps[block] = generation

    def write(self, held: Held) -> None:
        """KV of all known tokens."""
        self.stamp(held.table)
        for position in range(held.committed, len(held.tokens)):
            block, generation = held.table[position // SIZE]
            assert all(shard.stamps[block] == generation for shard in self.shards)
            self.memory[block][position % SIZE] = tuple(held.tokens[: position + 1])
        held.committed = len(held.tokens)

    # What shards do

    def seal(self, acknowledged: bool = True) -> None:
        """The next batch goes to the shards; without `acknowledged` the crash comes between them."""
        batch = self.core.take_seals()
        if batch is None:
            return
        shards = self.shards if acknowledged else self.shards[: self.random.randrange(NUM_SHARDS + 1)]
        for shard in shards:
            rows = np.zeros(len(batch.block_ids), directory.BLOCK_ROW)
            rows["generation"], rows["filled"] = batch.generations, SIZE
            rows["depth"], rows["namespace_id"] = batch.depths, batch.namespace_ids
            rows["digest"] = np.frombuffer(batch.digests, "V32")
            rows["parent"] = np.frombuffer(batch.parent_digests, "V32")
            assert (shard.stamps[batch.block_ids] == batch.generations).all(), "I3: sealed by an old occupant"
            directory.seal(shard.rows, batch.block_ids, rows)
        if acknowledged:
            self.core.acknowledge_seals(batch.seal_id)

    # The crash

    def crash(self) -> None:
        """The control plane dies, and another one starts."""
        self.crashes += 1
        if self.random.random() < 0.5:
            self.seal(acknowledged=False)
        self.core.settle()
        columns = self.core.state.columns
        indexed = np.flatnonzero(columns.indexed)[1:]
        sealed = [
            block
            for block in indexed.tolist()
            if all(shard.stamps[block] == columns.generation[block] for shard in self.shards)
        ]
        digests = columns.digest[sealed].copy()
        self.incarnation += 1
        self.core = self._core()
        self.core.set_ready(False)
        self.kept += self.core.survive(survivors(self.shards, self.incarnation))
        assert (self.core.state.pool.index.find_all(digests) != 0).all(), "sealed blocks are lost"
        self.core.check_integrity()
        engines, self.engines = self.engines, []
        self.random.shuffle(engines)
        for engine in engines:
            unseen, engine.lost = engine.lost, None
            session = self.core.open_session(self.now, 8, 300.0, engine.session_id)
            if self.random.random() < 0.2:
                self.core.end_session(session.session_id)
                self.core.defer_held(session.session_id, np.array(sorted(engine.hold_map()), np.int64))
                self.zombies.append(engine)
            else:
                self.declare(engine, unseen)
                self.engines.append(engine)
            self.core.check_integrity()
            self.check()
        self.core.conclude(np.maximum.reduce([shard.stamps for shard in self.shards]))
        self.core.set_ready(True)
        self.core.check_integrity()
        for number in range(NUM_ENGINES - len(self.engines)):
            self._open(1000 * self.crashes + number)

    def declare(self, engine: Engine, unseen: tuple[Step, StepResult] | None) -> None:
        """An engine says what it holds. Of a step whose answer is lost it knows what it sent."""
        if unseen is not None and unseen[0].finish is not None:
            for number in unseen[0].finish.sequence_ids.tolist():
                gone = engine.held.pop(number)
                engine.released.append(Released(engine.step_id, gone.committed, gone.table))
        for each in engine.released:
            each.step = min(each.step, engine.step_id)
        for number in engine.drained:
            engine.held[number].drains = False
        engine.drained, engine.copied = [], []
        for held in engine.held.values():
            held.drains = False
        declared = [
            Declared(
                Admit(number, np.array(held.tokens, "<u4").tobytes()),
                min(len(held.tokens), 4),
                held.committed,
                np.array([block for block, _ in held.table], np.int64),
                u64s([generation for _, generation in held.table]),
                runs=held.running,
                preempted=not held.running,
            )
            for number, held in engine.held.items()
        ]
        deferred = [
            (each.step, np.array([block for block, _ in each.table], np.int64), u64s([mark for _, mark in each.table]))
            for each in engine.released
            if each.table and each.step > 0
        ]
        cuts = self.core.adopt(
            engine.session_id, Declaration(tuple(declared), tuple(deferred), engine.step_id, engine.completed), self.now
        )
        for cut in cuts:
            held, keep = engine.held[cut.sequence_id], cut.num_tokens // SIZE
            honest = (
                {CutReason.NEVER_WRITTEN} if unseen is None else {CutReason.NEVER_WRITTEN, CutReason.STALE_GENERATION}
            )
            assert cut.reason in honest, f"an honest engine was cut: {cut}"
            assert unseen is not None or cut.num_tokens >= held.committed, "committed tokens were cut"
            self.cut += 1
            engine.released.append(Released(engine.step_id, max(held.committed - cut.num_tokens, 0), held.table[keep:]))
            held.table, held.committed = held.table[:keep], min(held.committed, cut.num_tokens)
            held.running = bool(held.table)
        engine.seen = engine.step_id
        stamps = [shard.stamps for shard in self.shards]
        for each in engine.released:
            # Nothing was launched on what was never stamped; what has a newer stamp was over before.
            each.table = [
                (block, mark) for block, mark in each.table if any(int(stamp[block]) == mark for stamp in stamps)
            ]
        engine.released = [each for each in engine.released if each.step > engine.completed]

    # What must hold

    def _generations(self, result: StepResult) -> None:
        for tables in result.tables:
            for block, generation in zip(tables.block_ids.tolist(), tables.generations.tolist(), strict=True):
                known = self.newest.get(block, 0)
                assert generation >= known or any(shard.stamps[block] == generation for shard in self.shards)
                if generation > known:
                    assert generation >> 32 == self.incarnation, "an old incarnation's generation is new"
                    self.newest[block] = generation

    def check(self) -> None:
        """Devices scribble where they may, and committed tokens read their own content."""
        for engine in self.engines + self.zombies:
            # Work on what it holds is launched with the answers that it has seen; work beyond is not.
            running = engine in self.zombies and engine.completed < engine.seen
            for gone in engine.released + [
                Released(1 << 60, each.committed, each.table) for each in engine.held.values() if running
            ]:
                for index, (block, generation) in enumerate(gone.table):
                    launched = [int(shard.stamps[block]) for shard in self.shards]
                    assert max(launched) <= generation, f"I9: block {block} was given away under a running engine"
                    for slot in range(SIZE):
                        if (
                            index * SIZE + slot >= gone.committed
                            and gone.step < 1 << 61
                            and min(launched) == generation
                        ):
                            self.memory[block][slot] = "scribbled"
        for engine in self.engines:
            for held in engine.held.values() if engine.lost is None else ():
                for position in range(held.committed):
                    block, _ = held.table[position // SIZE]
                    found = self.memory[block][position % SIZE]
                    assert found == tuple(held.tokens[: position + 1]), f"I2: wrong bytes in block {block}"

    def run(self, events: int) -> None:
        """Random events."""
        for _ in range(events):
            self.now += 0.1
            choice = self.random.random()
            if choice < 0.78:
                self.act(self.random.choice(self.engines))
            elif choice < 0.92:
                self.seal()
            elif choice < 0.96 and self.zombies:
                gone = self.zombies.pop()
                if gone.session_id in self.core.state.sessions:
                    self.core.session_drained(gone.session_id)
            elif choice >= 0.96:
                self.zombies = self._drain_zombies()
                self.crash()
            self.core.check_integrity()
            self.check()

    def _drain_zombies(self) -> list[Engine]:
        """A zombie over a second crash stays fenced: this model lets its processes end before."""
        for engine in self.zombies:
            self.core.session_drained(engine.session_id)
        return []
