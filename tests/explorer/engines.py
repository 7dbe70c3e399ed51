"""The engines: what they receive, launch, finish and acknowledge."""

from collections.abc import Iterator
from typing import Any

from explorer import control as control_plane
from explorer.parts import (
    COMMITTED,
    DONE,
    FAILED,
    HELD,
    IDLE,
    INCARNATION,
    LIVE,
    NAMES,
    RELEASED,
    RUNNING,
    SHARDS,
    STAMPED,
    A,
    Engine,
    Message,
    R,
    Sequence,
)
from explorer.shard import end_worker
from explorer.state import Model, State, put, spend, with_engine, with_shard

Steps = Iterator[tuple[str, State]]


def steps(m: Model, state: State) -> Steps:
    """Everything that engines can do next."""
    for index in (A, R):
        engine = state.engines[index]
        if state.budget.ticks[index] and engine.age < 2:
            yield f"half a time to live of {NAMES[index]} passes", _tick(state, index)
        if not all(engine.alive):
            continue
        yield from _receive(m, state, index)
        if index == A:
            yield from _map_again(m, state)
        for number in range(len(engine.sequences)):
            yield from _end(m, state, index, number)
        for number, control in enumerate(state.controls):
            yield from control_plane.requests(m, state, index, number)
            if control.sessions[index] == "fencing" and index == A and engine.age == 2:
                yield from _lease_over(m, state, number)
        if state.budget.deaths[index]:
            yield from _die(state, index)
    if m.bounds.budget.ticks[A] and not m.on("only messages renew a lease"):
        engine = state.engines[A]
        if engine.age and any(control.start == engine.start for control in state.controls):
            yield "A takes its open stream for a renewal", with_engine(state, A, engine._replace(age=0))
    for worker in SHARDS:
        if state.engines[A].alive[worker]:
            for number in range(len(state.engines[A].sequences)):
                yield from _work(m, state, worker, number)
    yield from _send(m, state)


def replaced(engine: Engine, number: int, **changes: Any) -> Engine:
    """The engine with one sequence changed."""
    return engine._replace(sequences=put(engine.sequences, number, engine.sequences[number]._replace(**changes)))


def _tick(state: State, index: int) -> State:
    engine = state.engines[index]
    state = with_engine(state, index, engine._replace(age=engine.age + 1))
    controls = tuple(
        control._replace(timers=put(control.timers, index, min(2, control.timers[index] + 1)))
        for control in state.controls
    )
    ticks = put(state.budget.ticks, index, state.budget.ticks[index] - 1)
    return spend(state._replace(controls=controls), ticks=ticks)


def _die(state: State, index: int) -> Steps:
    left = spend(state, deaths=put(state.budget.deaths, index, state.budget.deaths[index] - 1))
    if index == R:
        yield "R dies", with_engine(left, R, state.engines[R]._replace(alive=(False, False)))
        return
    yield "A's worker on s1 dies", end_worker(left, 1)
    yield "A dies", end_worker(end_worker(left, 0), 1)


def _receive(m: Model, state: State, index: int) -> Steps:
    engine = state.engines[index]
    if not engine.inbox:
        return
    (start, kind, sequence), *rest = engine.inbox
    name = NAMES[index]
    engine = engine._replace(inbox=tuple(rest))
    if start < engine.start and m.on("stream epoch"):
        yield f"{name} discards an answer of an older stream", with_engine(state, index, engine)
    elif kind == "grant" and sequence is not None:
        where = f"(b{sequence.block}, g{sequence.generation // INCARNATION}.{sequence.generation % INCARNATION})"
        what = "a hit on" if sequence.hit else "a grant of"
        engine = engine._replace(sequences=(*engine.sequences, sequence))
        yield f"{name} receives {what} {where} for {sequence.tag}", with_engine(state, index, engine)
    else:  # revoked or lost: all that it has
        sequences = tuple(each._replace(status=RELEASED) for each in engine.sequences)
        after = with_engine(state, index, engine._replace(sequences=sequences))
        yield f"{name} receives that its blocks are {kind}", after


def _map_again(m: Model, state: State) -> Steps:
    """A attaches to memory that took the place of what it had mapped, once nothing of it runs there any more."""
    engine, memory = state.engines[A], tuple(shard.memory for shard in state.shards)
    over = all(each.status == RELEASED and _drained(m, each) for each in engine.sequences)
    if engine.mapped != memory and over:
        boots = tuple(shard.boot for shard in state.shards)
        yield "A maps the shards' memory again", with_engine(state, A, engine._replace(mapped=memory, boots=boots))


def _may_launch(m: Model, engine: Engine) -> bool:
    return engine.age < 1 or not m.on("nothing is launched after ttl/2")


def _work(m: Model, state: State, worker: int, number: int) -> Steps:
    """A's worker on one shard: hold bit, stamp, checks, launch, end of the kernel."""
    engine, shard = state.engines[A], state.shards[worker]
    sequence = engine.sequences[number]
    phase, at = sequence.phases[worker], sequence.block
    here = engine.mapped[worker] == shard.memory
    name = f"A's worker on s{worker}"

    def to(phase: int, state: State = state) -> State:
        phases = put(sequence.phases, worker, phase)
        return with_engine(state, A, replaced(engine, number, phases=phases))

    # What a worker has begun to launch comes before what follows; its kernels end in that order.
    begun = (HELD, STAMPED, LIVE) if phase == LIVE else (HELD, STAMPED)
    if m.on("stream order") and any(each.phases[worker] in begun for each in engine.sequences[:number]):
        return
    if phase == IDLE and sequence.status == RUNNING:
        if not m.on("hold bit before the lease check") and not _may_launch(m, engine):
            return
        granted = sequence.grant.boots[worker]
        if granted < engine.boots[worker] or (not here and granted == shard.boot):
            return  # it was granted on memory that A has not mapped any more, or not yet
        first = STAMPED if sequence.hit else HELD
        if m.on("hold bit before the lease check"):
            yield f"{name} holds b{at}", to(first, _hold(state, worker, at))
        else:
            yield f"{name} has checked its lease for b{at}", to(first)
    elif phase == HELD:
        if not here:
            yield f"{name} stamps memory that is nobody's any more", to(STAMPED)
        elif shard.stamps[at] > sequence.generation and m.on("stale generations are refused"):
            yield f"{name} finds a newer stamp on b{at}", to(FAILED)
        else:
            stamped = shard._replace(stamps=put(shard.stamps, at, sequence.generation))
            yield f"{name} stamps b{at}", to(STAMPED, with_shard(state, worker, stamped))
    elif phase == STAMPED:
        raised = (
            max(
                each.incarnation
                for each, mapped in zip(state.shards, engine.mapped, strict=True)
                if each.memory == mapped
            )
            if here
            else 0
        )
        stale = (
            not sequence.hit and sequence.grant.incarnation < raised and m.on("a stamp below the raised incarnation")
        )
        late = not _may_launch(m, engine) and m.on("hold bit before the lease check")
        if stale or late:
            yield f"{name} launches nothing: {'incarnation' if stale else 'lease'}", to(FAILED)
        else:
            yield (
                f"{name} launches a {'read' if sequence.hit else 'write'} of b{at}",
                to(LIVE, _hold(state, worker, at)),
            )
    elif phase == LIVE:
        after = to(DONE)
        if here and not sequence.hit:
            written = shard._replace(data=put(shard.data, at, sequence.tag))
            after = with_shard(after, worker, written)
        yield f"{name} completes its {'read' if sequence.hit else 'write'} of b{at}", after


def _hold(state: State, worker: int, block: int) -> State:
    """The block's bit in the worker's hold map is set."""
    shard = state.shards[worker]
    if state.engines[A].mapped[worker] != shard.memory or block in shard.bits:
        return state
    return with_shard(state, worker, shard._replace(bits=shard.bits | {block}))


def _send(m: Model, state: State) -> Steps:
    """R's writes, and what a rogue makes up."""
    engine = state.engines[R]
    if not all(engine.alive):
        return
    for number, sequence in enumerate(engine.sequences):
        for index in SHARDS:
            grant = sequence.grant
            run = Message(
                "run",
                index,
                grant.incarnation,
                grant.boots[index],
                grant.epoch,
                sequence.block,
                sequence.generation,
                sequence.tag,
            )
            if sequence.status == RUNNING and not sequence.hit and sequence.phases[index] == IDLE:
                after = with_engine(state, R, replaced(engine, number, phases=put(sequence.phases, index, LIVE)))
                yield f"R sends its write of b{sequence.block} to s{index}", after._replace(net=state.net | {run})
            if state.budget.rogue and "rewrite" in m.bounds.operations and sequence.phases[index] == DONE:
                again = run._replace(tag="rewritten")
                after = spend(state, rogue=state.budget.rogue - 1)
                yield f"R writes b{sequence.block} again on s{index}", after._replace(net=state.net | {again})
    if state.budget.rogue and "forge" in m.bounds.operations:
        newest = state.controls[-1] if state.controls else None
        for index, shard in enumerate(state.shards):
            if newest is None:
                break
            for at, stamp in enumerate(shard.stamps):
                forged = Message(
                    "run", index, newest.incarnation, shard.boot, shard.epoch, at, stamp + 1, "forged", forged=True
                )
                after = spend(state, rogue=state.budget.rogue - 1)
                yield f"R forges a grant of b{at} on s{index}", after._replace(net=state.net | {forged})


def _drained(m: Model, sequence: Sequence) -> bool:
    """Whether nothing of it runs or will run."""
    running = (HELD, STAMPED, LIVE) if m.on("acknowledgement means drained") else ()
    return not any(phase in running for phase in sequence.phases)


def _end(m: Model, state: State, index: int, number: int) -> Steps:
    """Commit, finish, and the acknowledgement of what was released."""
    engine = state.engines[index]
    sequence = engine.sequences[number]
    name, at = NAMES[index], f"b{sequence.block}"
    serving = [
        which
        for which, control in enumerate(state.controls)
        if control.start == engine.start and control.sessions[index] == "open"
    ]
    for which in serving:
        needed = (DONE,) if m.on("commit after completion") else (LIVE, DONE)
        if sequence.status == RUNNING and not sequence.hit and all(phase in needed for phase in sequence.phases):
            after = with_engine(state, index, replaced(engine, number, status=COMMITTED))
            yield f"{name} commits {at}", control_plane.commit(m, after, which, sequence)
        if sequence.status != RELEASED:
            after = with_engine(state, index, replaced(engine, number, status=RELEASED))
            label = f"{name} finishes with {at}"
            if _drained(m, sequence):
                after = _dropped(after, index, number)
                yield f"{label}, drained", control_plane.release(m, after, which, index, sequence, drained=True)
            else:
                yield label, control_plane.release(m, after, which, index, sequence, drained=False)
        elif _drained(m, sequence) or (index == R and state.budget.rogue and "lie" in m.bounds.operations):
            after = _dropped(state, index, number)
            if not _drained(m, sequence):
                after = spend(after, rogue=state.budget.rogue - 1)
            yield f"{name} says that {at} is drained", control_plane.drained(after, which, index, sequence)


def _dropped(state: State, index: int, number: int) -> State:
    """The engine forgets a sequence; its hold bits are cleared."""
    engine = state.engines[index]
    sequence = engine.sequences[number]
    engine = engine._replace(sequences=(*engine.sequences[:number], *engine.sequences[number + 1 :]))
    state = with_engine(state, index, engine)
    if index == A and not any(each.block == sequence.block for each in engine.sequences):
        for worker in SHARDS:
            shard = state.shards[worker]
            if engine.mapped[worker] == shard.memory and sequence.block in shard.bits:
                state = with_shard(state, worker, shard._replace(bits=shard.bits - {sequence.block}))
    return state


def _lease_over(m: Model, state: State, which: int) -> Steps:
    """A finds its lease gone: once all has drained it says so."""
    engine = state.engines[A]
    if not all(_drained(m, sequence) for sequence in engine.sequences):
        return
    after = state
    for _ in engine.sequences:
        after = _dropped(after, A, 0)
    after = with_engine(after, A, after.engines[A]._replace(inbox=(), start=state.controls[which].start))
    yield "A says that it has drained", control_plane.session_over(after, which, A)
