"""The compute service: messages carried out, kernels that end, restarts."""

from collections.abc import Iterator

from explorer.parts import DONE, FAILED, LIVE, SHARDS, A, Job, Message, R, Row, Shard
from explorer.state import Model, State, put, spend, with_engine, with_shard

Steps = Iterator[tuple[str, State]]


def steps(m: Model, state: State) -> Steps:
    """Everything that a shard, or the network before it, can do next."""
    for message in sorted(state.net):  # so that every run takes the same order
        if message.kind.startswith("ack"):
            continue
        for label, after in _deliver(m, state, message):
            yield label, after._replace(net=after.net - {message})
            if state.budget.duplicates:
                yield f"{label}, and its copy is still under way", spend(after, duplicates=state.budget.duplicates - 1)
    for index in SHARDS:
        shard = state.shards[index]
        for job in shard.jobs[: 1 if m.on("stream order") else None]:
            yield f"s{index} runs R's kernel on {_name(job.block, job.generation)}", _run(state, index, job)
        if state.budget.losses:
            after = spend(state, losses=state.budget.losses - 1)
            yield f"s{index} restarts with empty memory", with_shard(after, index, _lost(shard))
        if state.budget.reattaches:
            after = spend(state, reattaches=state.budget.reattaches - 1)
            yield f"s{index} restarts and takes its memory up again", with_shard(after, index, _again(m, shard))


def _deliver(m: Model, state: State, message: Message) -> Steps:
    index = message.shard
    shard = state.shards[index]
    if message.kind == "run":
        refused = _refusal(m, shard, message)
        copies = m.bounds.budget.duplicates > 0
        if refused:
            # A copy is not what R waits for.
            after = state if refused == "its plan is closed" else _answer(state, message, FAILED)
            yield f"s{index} refuses R's write of {_named(message)}: {refused}", after
        else:
            yield (
                f"s{index} accepts R's write of {_named(message)}",
                with_shard(state, index, _accept(shard, message, remember=copies)),
            )
        return
    if shard.incarnation > message.incarnation and m.on("incarnation on messages"):
        yield f"s{index} refuses an older control plane's {message.kind}", state
        return
    if shard.boot != message.boot and m.on("boot id on messages"):
        yield f"s{index} refuses a {message.kind} for its last boot", state
        return
    ok, changed = True, shard
    if message.kind == "seal":
        ok, changed = _seal(m, shard, message)
    elif message.kind == "void":
        row = shard.rows[message.block]
        if row.generation == message.generation:
            changed = shard._replace(rows=put(shard.rows, message.block, row._replace(digest="")))
    elif message.kind == "version":
        changed = shard._replace(version=max(shard.version, message.generation))
    else:
        # Drained: what was queued before has run.
        if shard.jobs and m.on("acknowledgement means drained"):
            return
        if message.kind == "fence":
            changed = shard._replace(fenced=True, tables=frozenset())
        elif message.kind == "epoch":
            changed = shard._replace(epoch=message.epoch, tables=frozenset(), rows=(Row(),) * len(shard.rows))
    after = with_shard(state, index, changed)
    ack = message._replace(kind=f"ack {message.kind}" if ok else f"ack no {message.kind}")
    if message.kind != "void":
        after = after._replace(net=after.net | {ack})
    yield f"s{index} {'carries out' if ok else 'refuses'} {message.kind} {_named(message)}", after


def _refusal(m: Model, shard: Shard, run: Message) -> str:
    """Why a remote write is refused; empty when it is not."""
    stamp, row = shard.stamps[run.block], shard.rows[run.block]
    granted = (run.block, run.generation) in shard.tables
    current = row.generation == run.generation and (
        stamp == row.generation or not m.on("a row counts only with its stamp")
    )
    refusals = (
        (run.forged and m.on("grants checked"), "not granted"),
        (run.tag in shard.plans and m.on("a plan runs once"), "its plan is closed"),
        (shard.fenced, "fenced"),
        (shard.boot != run.boot and m.on("boot id on messages"), "another boot"),
        (shard.epoch != run.epoch and m.on("pool epoch in grants"), "another pool epoch"),
        (shard.incarnation > run.incarnation and not granted and m.on("incarnation in grants"), "older incarnation"),
        (stamp > run.generation and m.on("stale generations are refused"), "stale generation"),
        (current and bool(row.digest) and m.on("sealed rows refuse writes"), "sealed"),
        (current and row.filled and m.on("filled slots refuse writes"), "filled"),
    )
    return next((why for refused, why in refusals if refused), "")


def _accept(shard: Shard, run: Message, *, remember: bool) -> Shard:
    """Stamp, then row, then the kernel is queued."""
    at, generation = run.block, run.generation
    rows = shard.rows
    if rows[at].generation != generation or shard.stamps[at] != generation:
        rows = put(rows, at, Row(generation))
    return shard._replace(
        rows=rows,
        stamps=put(shard.stamps, at, generation),
        tables=shard.tables | {(at, generation)},
        jobs=(*shard.jobs, Job(run.tag, at, generation, run.tag)),
        plans=shard.plans | {run.tag} if remember else shard.plans,
    )


def _run(state: State, index: int, job: Job) -> State:
    shard = state.shards[index]
    row = shard.rows[job.block]
    if row.generation == job.generation:
        row = row._replace(filled=True)
    left = list(shard.jobs)
    left.remove(job)
    shard = shard._replace(
        jobs=tuple(left), rows=put(shard.rows, job.block, row), data=put(shard.data, job.block, job.tag)
    )
    message = Message("run", index, 0, 0, block=job.block, generation=job.generation, tag=job.tag)
    return _answer(with_shard(state, index, shard), message, DONE)


def _answer(state: State, run: Message, phase: int) -> State:
    """R learns how its write on one shard went."""
    engine = state.engines[R]
    for number, sequence in enumerate(engine.sequences):
        same = (sequence.block, sequence.generation, sequence.tag) == (run.block, run.generation, run.tag)
        if same and sequence.phases[run.shard] == LIVE:
            sequence = sequence._replace(phases=put(sequence.phases, run.shard, phase))
            return with_engine(state, R, engine._replace(sequences=put(engine.sequences, number, sequence)))
    return state


def _seal(m: Model, shard: Shard, seal: Message) -> tuple[bool, Shard]:
    row, at = shard.rows[seal.block], seal.block
    ok = seal.generation >= row.generation
    if m.on("a seal needs its stamp"):
        ok = ok and seal.generation == shard.stamps[at]
        ok = ok and (row.generation != seal.generation or row.filled)
    if not ok:
        return False, shard
    return True, shard._replace(rows=put(shard.rows, at, Row(seal.generation, True, seal.tag)))


def _lost(shard: Shard) -> Shard:
    count = len(shard.rows)
    return Shard(
        boot=shard.boot + 1,
        memory=shard.memory + 1,
        incarnation=0,
        epoch=0,
        version=0,
        rows=(Row(),) * count,
        stamps=(0,) * count,
        data=("",) * count,
        bits=frozenset(),
        sessions=frozenset(),
        tables=frozenset(),
        jobs=(),
        plans=frozenset(),
        fenced=False,
    )


def _again(m: Model, shard: Shard) -> Shard:
    kept = m.on("sessions and hold maps in shared memory")
    rows = tuple(
        row
        if row.digest and (row.generation == stamp or not m.on("a row counts only with its stamp"))
        else Row(row.generation)
        for row, stamp in zip(shard.rows, shard.stamps, strict=True)
    )
    return shard._replace(
        boot=shard.boot + 1,
        rows=rows,
        jobs=(),
        tables=frozenset(),
        plans=frozenset(),
        sessions=shard.sessions if kept else frozenset(),
        bits=shard.bits if kept else frozenset(),
    )


def end_worker(state: State, index: int) -> State:
    """A's worker on one shard dies: what it launched ends with it, half written."""
    engine, shard = state.engines[A], state.shards[index]
    sequences = []
    for sequence in engine.sequences:
        phase = sequence.phases[index]
        if phase == LIVE and not sequence.hit and engine.mapped[index] == shard.memory:
            shard = shard._replace(data=put(shard.data, sequence.block, "half written"))
        ended = FAILED if phase < DONE else phase
        sequences.append(sequence._replace(phases=put(sequence.phases, index, ended)))
    engine = engine._replace(alive=put(engine.alive, index, False), sequences=tuple(sequences))
    return with_shard(with_engine(state, A, engine), index, shard)


def _name(block: int, generation: int) -> str:
    return f"(b{block}, g{generation // 10}.{generation % 10})"


def _named(message: Message) -> str:
    if message.kind in ("version", "fence", "epoch"):
        return str(message.generation or "")
    return f"{_name(message.block, message.generation)} {message.tag}"
