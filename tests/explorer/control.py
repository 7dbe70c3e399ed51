"""The control plane: who gets a block, what is published, whose lease is over, what is left after a restart."""

from collections.abc import Iterator

from explorer.parts import INCARNATION, NAMES, SHARDS, A, Block, Control, Grant, Message, R, Seal, Sequence
from explorer.recovery import declare, without_engine
from explorer.recovery import steps as recovery_steps
from explorer.state import Model, State, put, spend, with_control, with_engine

Steps = Iterator[tuple[str, State]]


def steps(m: Model, state: State) -> Steps:
    """Everything that control planes can do next, requests of engines apart."""
    for which, control in enumerate(state.controls):
        name = f"CP{control.start}"
        if state.budget.crashes:
            after = state._replace(controls=(*state.controls[:which], *state.controls[which + 1 :]))
            yield f"{name} crashes", spend(after, crashes=state.budget.crashes - 1)
        for message in sorted(state.net):
            if message.kind.startswith("ack") and message.incarnation == control.incarnation:
                after = state._replace(net=state.net - {message})
                yield f"{name} reads {message.kind} of s{message.shard}", _acknowledged(m, after, which, message)
        yield from _leases(m, state, which, name)
        if control.mode == "ready":
            yield from _decisions(m, state, which, name)
    yield from recovery_steps(m, state)


def _holders(block: Block) -> set[int]:
    return {engine for engine, _ in block.held | block.deferred}


def requests(m: Model, state: State, index: int, which: int) -> Steps:
    """What one engine asks of one control plane; it is answered at once, the answer takes its time."""
    engine, control = state.engines[index], state.controls[which]
    name = f"{NAMES[index]}, CP{control.start}"
    if control.sessions[index] == "silent" and control.start > engine.start:
        yield from declare(m, state, index, which)
    opens = index == R and "open" in m.bounds.operations and control.mode == "ready"
    if opens and control.sessions[index] == "none" and control.start > engine.start and not engine.sequences:
        opened = control._replace(sessions=put(control.sessions, index, "open"))
        after = with_engine(state, index, engine._replace(start=control.start, age=0))
        yield f"{name}: opens a session", with_control(after, which, opened)
    if control.sessions[index] != "open" or control.start != engine.start:
        return
    if engine.age or control.timers[index]:
        # A renewal by a control plane that the shards follow no more would outlive what the newer one waits for.
        follows = all(shard.incarnation <= control.incarnation for shard in state.shards)
        renewed = 0 if follows or not m.on("a superseded renewal renews nothing") else engine.age
        after = with_control(state, which, control._replace(timers=put(control.timers, index, 0)))
        yield f"{name}: renewed", with_engine(after, index, engine._replace(age=renewed))
    prompts = state.budget.prompts[index]
    if not prompts or control.mode != "ready":
        return
    digest = f"{prompts[0]}{control.version}"
    if index == R and "queue" in m.bounds.operations:
        if not control.waiting:
            yield f"{name}: {digest} waits", with_control(state, which, control._replace(waiting=digest))
            return
        digest = control.waiting
    asked = spend(state, prompts=put(state.budget.prompts, index, prompts[1:]))
    yield from _admit(m, asked, index, which, digest)


def _admit(m: Model, state: State, index: int, which: int, digest: str) -> Steps:
    control = state.controls[which]._replace(waiting="")
    name = f"{NAMES[index]}, CP{control.start}"
    grant = Grant(control.incarnation, control.boots, control.epoch)
    pinned = {seal.block for seal in control.seals}
    hits = [at for at, block in enumerate(control.blocks) if block.digest == digest]
    for at, block in enumerate(control.blocks):
        hit = at in hits
        if hits and (not hit or (index, block.generation) in block.held | block.deferred):
            continue
        own = {index} if "reuse" in m.bounds.operations else set()
        if not hit and (block.held or {engine for engine, _ in block.deferred} - own or at in pinned or block.digest):
            continue
        if hit:
            generation, counter, given = block.generation, control.counter, state.given
        else:
            counter = control.counter + 1
            generation = control.incarnation * INCARNATION + counter
            given = state.given | {(at, generation)}
        held = block._replace(generation=generation, held=block.held | {(index, generation)})
        sequence = Sequence(digest, at, generation, hit, grant)
        after = with_control(
            state, which, control._replace(counter=counter, blocks=put(control.blocks, at, held))
        )._replace(given=given)
        engine = state.engines[index]
        answer = (control.start, "grant", sequence)
        after = with_engine(after, index, engine._replace(inbox=(*engine.inbox, answer)))
        if not hit and len(given) == len(state.given):
            after = after._replace(bad="a generation is handed out twice")
        if hit and int(digest[-1]) < state.removed:
            after = after._replace(bad=f"removed content: {NAMES[index]} hits {digest}")
        yield f"{name}: {digest} {'hits' if hit else 'gets'} (b{at}, g{generation // 10}.{generation % 10})", after


def commit(m: Model, state: State, which: int, sequence: Sequence) -> State:
    """A full block goes to sealing."""
    control = state.controls[which]
    at, generation = sequence.block, sequence.generation
    holders = {each for _, each in control.blocks[at].held}
    if generation not in holders or control.mode != "ready":
        return state
    messages = {
        Message("seal", index, control.incarnation, control.boots[index], 0, at, generation, sequence.tag)
        for index in SHARDS
    }
    seal = Seal(at, generation, sequence.tag, frozenset())
    blocks = control.blocks
    if not m.on("index after the last acknowledgement"):
        blocks = put(blocks, at, blocks[at]._replace(digest=sequence.tag))
    control = control._replace(seals=control.seals | {seal}, blocks=blocks)
    return with_control(state._replace(net=state.net | messages), which, control)


def release(m: Model, state: State, which: int, index: int, sequence: Sequence, *, drained: bool) -> State:
    """A sequence of an engine ends; its reference is deferred while it may still be touched (I9)."""
    control = state.controls[which]
    at, reference = sequence.block, (index, sequence.generation)
    block = control.blocks[at]
    deferred = block.deferred
    if drained and m.on("a drained finish acknowledges"):
        # The revocation, or the loss, that is on its way to the engine: it will know the sequence no more.
        deferred -= {reference}
    elif not drained and reference in block.held and m.on("deferral"):
        deferred |= {reference}
    block = block._replace(held=block.held - {reference}, deferred=deferred)
    return with_control(state, which, control._replace(blocks=put(control.blocks, at, block)))


def drained(state: State, which: int, index: int, sequence: Sequence) -> State:
    """An engine says that a released sequence runs no more."""
    control = state.controls[which]
    block = control.blocks[sequence.block]
    reference = (index, sequence.generation)
    # A reference that is still held was not released yet in the eyes of this control plane: finishing drains it too.
    block = block._replace(held=block.held - {reference}, deferred=block.deferred - {reference})
    return with_control(state, which, control._replace(blocks=put(control.blocks, sequence.block, block)))


def session_over(state: State, which: int, index: int) -> State:
    """Nothing of a session runs or will run: all its references go, the shards forget it."""
    control = state.controls[which]
    control = control._replace(
        sessions=put(control.sessions, index, "none"),
        blocks=tuple(without_engine(block, index) for block in control.blocks),
    )
    shards = tuple(
        shard._replace(sessions=shard.sessions - {index}) if shard.incarnation <= control.incarnation else shard
        for shard in state.shards
    )
    return with_control(state._replace(shards=shards), which, control)


def _leases(m: Model, state: State, which: int, name: str) -> Steps:
    control = state.controls[which]
    if control.mode in ("starting", "epoch"):
        return
    for index in (A, R):
        session = control.sessions[index]
        if control.timers[index] == 2 and session in ("open", "silent"):
            yield f"{name} ends the lease of {NAMES[index]}", _expire(m, state, which, index)
    alive = state.engines[A].alive
    gone = not any(alive) if m.on("gone means gone on every shard") else not all(alive)
    if gone and control.sessions[A] != "none":
        yield f"{name} hears that A is gone", session_over(state, which, A)
    ended = ("fencing",) if m.on("an empty hold map counts after the lease") else ("fencing", "open")
    if control.sessions[A] in ended:
        yield from _quiet(state, which, name)
    fenced = {index for what, index in control.acks if what == "fence"}
    if control.sessions[R] == "fencing" and len(fenced) == len(SHARDS):
        yield f"{name} has fenced R everywhere", session_over(state, which, R)


def _quiet(state: State, which: int, name: str) -> Steps:
    """Shards that nobody can tell any more that A has drained read its hold map."""
    control = state.controls[which]
    for index, shard in enumerate(state.shards):
        follows = (shard.boot, shard.incarnation) == (control.boots[index], control.incarnation)
        if shard.bits or not follows or ("quiet", index) in control.acks:
            continue
        heard = control._replace(acks=control.acks | {("quiet", index)})
        after = with_control(state, which, heard)
        if all(("quiet", each) in heard.acks for each in SHARDS):
            heard = heard._replace(acks=frozenset(each for each in heard.acks if each[0] != "quiet"))
            after = session_over(with_control(state, which, heard), which, A)
        yield f"{name} hears from s{index} that A's hold map is empty", after


def _expire(m: Model, state: State, which: int, index: int) -> State:
    control = state.controls[which]
    blocks = control.blocks
    if index == A:
        # Exactly what is in its hold maps stays deferred.
        kept = frozenset().union(*(shard.bits for shard in state.shards)) if m.on("hold maps") else frozenset()
        blocks = tuple(
            bare._replace(deferred=bare.deferred | {(A, 0)}) if at in kept else bare
            for at, bare in enumerate(without_engine(block, A) for block in blocks)
        )
        messages = frozenset[Message]()
    else:
        messages = frozenset(
            Message("fence", each, control.incarnation, control.boots[each], 0, 0, 0, "R") for each in SHARDS
        )
    control = control._replace(
        sessions=put(control.sessions, index, "fencing"),
        blocks=blocks,
        acks=frozenset(each for each in control.acks if each[0] not in ("fence", "quiet")),
    )
    return with_control(state._replace(net=state.net | messages), which, control)


def _decisions(m: Model, state: State, which: int, name: str) -> Steps:
    control = state.controls[which]
    budget = state.budget
    for at, block in enumerate(control.blocks):
        if block.digest and not _holders(block) and budget.evictions and all(s.block != at for s in control.seals):
            voids = {
                Message("void", each, control.incarnation, control.boots[each], 0, at, block.generation)
                for each in SHARDS
            }
            evicted = control._replace(blocks=put(control.blocks, at, block._replace(digest="")))
            after = with_control(state._replace(net=state.net | voids), which, evicted)
            yield f"{name} evicts b{at}", spend(after, evictions=budget.evictions - 1)
        for index, generation in block.held if budget.revocations else ():
            if control.sessions[index] != "open" or index != A:
                continue
            engine = state.engines[index]
            moved = block._replace(
                held=block.held - {(index, generation)}, deferred=block.deferred | {(index, generation)}
            )
            after = with_control(state, which, control._replace(blocks=put(control.blocks, at, moved)))
            notice = (control.start, "revoked", None)
            after = with_engine(after, index, engine._replace(inbox=(*engine.inbox, notice)))
            yield f"{name} revokes b{at} of {NAMES[index]}", spend(after, revocations=budget.revocations - 1)
    if budget.removals and not control.removing:
        yield f"{name} begins to remove all prefixes", _remove(m, state, which)


def _remove(m: Model, state: State, which: int) -> State:
    control = state.controls[which]
    version = control.version + 1
    waiting = control.waiting
    if waiting and m.on("a version raise hashes waiting requests again"):
        waiting = f"{waiting[:-1]}{version}"
    blocks = tuple(block._replace(digest="") for block in control.blocks)
    control = control._replace(version=version, waiting=waiting, blocks=blocks)
    state = spend(state, removals=state.budget.removals - 1)
    if not m.on("the namespace version is stored before the answer"):
        return with_control(state, which, control)._replace(removed=version)
    messages = {Message("version", each, control.incarnation, control.boots[each], 0, 0, version) for each in SHARDS}
    control = control._replace(removing=version, acks=frozenset(each for each in control.acks if each[0] != "version"))
    return with_control(state._replace(net=state.net | messages), which, control)


def _acknowledged(m: Model, state: State, which: int, message: Message) -> State:
    control = state.controls[which]
    index = message.shard
    if message.boot != control.boots[index] and m.on("boot id on messages"):
        return state
    kind = message.kind.rsplit(" ", 1)[-1]
    if kind == "seal":
        return with_control(state, which, _sealed(m, control, message))
    if kind == "epoch" and message.epoch != control.epoch:
        return state
    control = control._replace(acks=control.acks | {(kind, index)})
    everywhere = all((kind, each) in control.acks for each in SHARDS)
    if kind == "version" and everywhere and control.removing:
        state = state._replace(removed=max(state.removed, control.removing))
        control = control._replace(removing=0)
    elif kind == "epoch" and everywhere and control.mode == "epoch":
        # Each shard had drained before it answered, and refuses grants of the old epoch.
        control = control._replace(mode="ready", blocks=tuple(without_engine(b, R) for b in control.blocks))
    return with_control(state, which, control)


def _sealed(m: Model, control: Control, message: Message) -> Control:
    for seal in control.seals:
        if (seal.block, seal.generation) != (message.block, message.generation):
            continue
        left = control.seals - {seal}
        if message.kind.startswith("ack no"):
            return control._replace(seals=left)
        seal = seal._replace(acks=seal.acks | {message.shard})
        needed = len(SHARDS) if m.on("a digest counts when it is on all shards") else 1
        if len(seal.acks) < needed:
            return control._replace(seals=left | {seal})
        block = control.blocks[seal.block]
        current = block.generation == seal.generation
        taken = any(other.digest == seal.digest for other in control.blocks)
        if current and not taken:
            block = block._replace(digest=seal.digest)
        return control._replace(seals=left, blocks=put(control.blocks, seal.block, block))
    return control
