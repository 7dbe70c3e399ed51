"""A control plane that starts, and pools whose shards restarted (design: ask those who hold the truth)."""

from collections.abc import Iterator

from explorer.parts import (
    COMMITTED,
    HELD,
    LIVE,
    NAMES,
    RELEASED,
    RUNNING,
    SHARDS,
    STAMPED,
    A,
    Block,
    Control,
    Grant,
    Message,
    R,
    Sequence,
    Shard,
)
from explorer.state import Model, State, put, spend, with_control, with_engine, with_shard

Steps = Iterator[tuple[str, State]]


def steps(m: Model, state: State) -> Steps:
    """Starts, registrations, inventories, READY."""
    if state.budget.starts and len(state.controls) < 2:
        yield _start(m, state)
    for which, control in enumerate(state.controls):
        name = f"CP{control.start}"
        for index, shard in enumerate(state.shards):
            newer = shard.incarnation < control.incarnation or (
                shard.incarnation == control.incarnation and shard.boot != control.boots[index]
            )
            if newer:
                yield f"s{index} registers with {name}", _register(m, state, which, index)
            here = shard.boot == control.boots[index] and shard.incarnation == control.incarnation
            if control.mode == "reconciling" and here and control.inventory[index] is None:
                yield f"{name} reads the inventory of s{index}", _inventory(m, state, which, index)
        if control.mode == "reconciling" and all(control.inventory):
            silent = "silent" in control.sessions or control.sessions[R] == "fencing"
            live = all(
                shard.boot == boot and shard.incarnation == control.incarnation
                for shard, boot in zip(state.shards, control.boots, strict=True)
            )
            if not silent and live:
                yield f"{name} opens the pool", _open(m, state, which)


def _start(m: Model, state: State) -> tuple[str, State]:
    start = _newest_start(state) + 1
    control = _fresh(m, start, max(shard.incarnation for shard in state.shards), len(state.shards[0].rows))
    after = state._replace(controls=(*state.controls, control))
    return f"CP{start} starts", spend(after, starts=state.budget.starts - 1)


def _newest_start(state: State) -> int:
    return max([control.start for control in state.controls] + [engine.start for engine in state.engines])


def _fresh(m: Model, start: int, incarnation: int, count: int) -> Control:
    """A control plane that knows nothing yet."""
    return Control(
        start=start,
        incarnation=incarnation + 1 if m.on("the incarnation is raised") else incarnation,
        mode="starting",
        boots=(0, 0),
        epoch=0,
        version=0,
        counter=0,
        blocks=(Block(),) * count,
        sessions=("none", "none"),
        timers=(0, 0),
        seals=frozenset(),
        inventory=(None, None),
        acks=frozenset(),
        removing=0,
        waiting="",
    )


def _register(m: Model, state: State, which: int, index: int) -> State:
    control, shard = state.controls[which], state.shards[index]
    restarted = control.boots[index] not in (0, shard.boot)
    if control.mode == "starting" and shard.incarnation == control.incarnation != 1 and not control.boots[index]:
        # Another start has taken this incarnation meanwhile. Whoever registered under it does so again.
        control = control._replace(incarnation=shard.incarnation + 1, boots=(0, 0))
    registered = control._replace(boots=put(control.boots, index, shard.boot))
    state = with_shard(state, index, shard._replace(incarnation=control.incarnation))
    if control.mode == "starting" and all(registered.boots):
        registered = registered._replace(mode="reconciling")
    elif control.mode == "reconciling" and restarted:
        sessions = tuple("none" if each == "none" else "silent" for each in control.sessions)
        registered = registered._replace(
            inventory=(None, None), sessions=sessions, blocks=(Block(),) * len(control.blocks), acks=frozenset()
        )
    state = with_control(state, which, registered)
    if control.mode in ("ready", "epoch") and restarted:
        if shard.epoch == control.epoch:
            return _begin_again(m, state, which)
        return lost(m, state, which)
    return state


def _begin_again(m: Model, state: State, which: int) -> State:
    """A shard has taken its memory up again, and what was sealed on it: everything is asked for, as after a start."""
    incarnation = max(state.controls[which].incarnation, *(shard.incarnation for shard in state.shards))
    fresh = _fresh(m, _newest_start(state) + 1, incarnation, len(state.shards[0].rows))
    return with_control(state, which, fresh)


def _inventory(m: Model, state: State, which: int, index: int) -> State:
    control = state.controls[which]
    upload = state.shards[index]._replace(
        data=(), bits=frozenset(), jobs=(), plans=frozenset(), memory=0, boot=0, incarnation=0
    )
    inventory = put(control.inventory, index, upload)
    control = control._replace(inventory=inventory)
    known = [each for each in inventory if each is not None]
    if len(known) == len(SHARDS):
        sessions = tuple("silent" if any(index in each.sessions for each in known) else "none" for index in (A, R))
        control = control._replace(
            sessions=sessions,
            version=max(each.version for each in known),
            epoch=max(each.epoch for each in known),
            blocks=_blocks(m, known),
        )
    return with_control(state, which, control)


def _blocks(m: Model, inventory: list[Shard]) -> tuple[Block, ...]:
    """Rows that are valid and the same on all shards; other blocks have no content."""
    blocks: list[Block] = []
    for at in range(len(inventory[0].rows)):
        good = [
            each.rows[at]
            for each in inventory
            if each.rows[at].digest
            and (each.rows[at].generation == each.stamps[at] or not m.on("a row counts only with its stamp"))
        ]
        if m.on("a digest counts when it is on all shards") and (len(good) < len(SHARDS) or len(set(good)) > 1):
            good = []
        digest = good[0].digest if good and all(block.digest != good[0].digest for block in blocks) else ""
        newest = max(max(each.rows[at].generation, each.stamps[at]) for each in inventory)
        blocks.append(Block(good[0].generation if digest else newest, digest))
    return tuple(blocks)


def declare(m: Model, state: State, index: int, which: int) -> Steps:
    """An engine says what it has: tables, and what it released that still runs."""
    control, engine = state.controls[which], state.engines[index]
    inventory = [each for each in control.inventory if each is not None]
    if control.mode != "reconciling" or len(inventory) < len(SHARDS):
        return
    if index == R and any(each.fenced for each in inventory):
        return
    blocks = control.blocks
    grant = Grant(control.incarnation, control.boots, control.epoch)
    sequences = []
    for sequence in engine.sequences:
        at, reference = sequence.block, (index, sequence.generation)
        block = blocks[at]
        if sequence.status == RELEASED:
            runs = any(phase in (HELD, STAMPED, LIVE) for phase in sequence.phases)
            if runs and m.on("a declaration lists what was released and still runs"):
                block = block._replace(deferred=block.deferred | {reference})
        elif block.digest == sequence.tag and block.generation == sequence.generation:
            block = block._replace(held=block.held | {reference})
            sequence = sequence._replace(grant=grant)
        elif _provable(index, sequence, inventory) and not sequence.hit and not block.held:
            block = block._replace(generation=sequence.generation, digest="", held=frozenset((reference,)))
            status = RUNNING if sequence.status == COMMITTED else sequence.status
            sequence = sequence._replace(grant=grant, status=status)
        else:
            if m.on("a cut at a declaration defers"):
                block = block._replace(deferred=block.deferred | {reference})
            sequence = sequence._replace(status=RELEASED)
        blocks = put(blocks, at, block)
        sequences.append(sequence)
    control = control._replace(
        blocks=blocks, sessions=put(control.sessions, index, "open"), timers=put(control.timers, index, 0)
    )
    engine = engine._replace(start=control.start, age=0, sequences=tuple(sequences))
    after = with_engine(with_control(state, which, control), index, engine)
    yield f"{NAMES[index]} declares itself to CP{control.start}", after


def _provable(index: int, sequence: Sequence, inventory: list[Shard]) -> bool:
    """Whether unsealed content is the claimer's: on every shard its generation was stamped before the restart."""
    at, generation = sequence.block, sequence.generation
    stamped = all(each.stamps[at] == generation for each in inventory)
    if index == R:
        return stamped and all((at, generation) in each.tables for each in inventory)
    return stamped


def _open(m: Model, state: State, which: int) -> State:
    control = state.controls[which]
    inventory = [each for each in control.inventory if each is not None]
    blocks = control.blocks
    if m.on("stamps are read again before READY") and m.on("a row counts only with its stamp"):
        blocks = tuple(
            block if all(shard.stamps[at] == block.generation for shard in state.shards) else block._replace(digest="")
            for at, block in enumerate(blocks)
        )
    control = control._replace(mode="ready", blocks=blocks, inventory=(None, None))
    state = with_control(state, which, control)
    if m.on("a row counts only with its stamp"):
        for at, block in enumerate(blocks):
            if block.digest and any(shard.stamps[at] != block.generation for shard in state.shards):
                state = state._replace(bad=f"a lost prefix: {block.digest} is indexed, and a shard has a newer stamp")
    epochs = {each.epoch for each in inventory}
    if len(epochs) > 1 or 0 in epochs:
        return lost(m, state, which)
    return state


def without_engine(block: Block, index: int) -> Block:
    """A block without any reference of an engine."""
    return block._replace(
        held=frozenset(each for each in block.held if each[0] != index),
        deferred=frozenset(each for each in block.deferred if each[0] != index),
    )


def lost(m: Model, state: State, which: int) -> State:
    """A new pool epoch: every sequence is lost, its reference is deferred (I9), and all shards are told."""
    control = state.controls[which]
    epoch = control.epoch + 1
    blocks = tuple(
        Block(
            block.generation,
            "",
            frozenset(),
            block.deferred | block.held if m.on("a new pool epoch defers") else frozenset(),
        )
        for block in control.blocks
    )
    messages = {Message("epoch", each, control.incarnation, control.boots[each], epoch) for each in SHARDS}
    engines = tuple(
        engine._replace(inbox=(*engine.inbox, (control.start, "lost", None)))
        if control.sessions[index] == "open"
        else engine
        for index, engine in enumerate(state.engines)
    )
    control = control._replace(
        mode="epoch",
        epoch=epoch,
        blocks=blocks,
        seals=frozenset(),
        acks=frozenset(each for each in control.acks if each[0] == "fence"),
    )
    return with_control(state._replace(net=state.net | messages, engines=engines), which, control)
