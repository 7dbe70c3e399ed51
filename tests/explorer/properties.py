"""What must hold in every state."""

from explorer.parts import COMMITTED, DONE, LIVE, NAMES, RUNNING, SHARDS, A, R
from explorer.state import Model, State


def violation(m: Model, state: State) -> str:
    """What is wrong in a state; empty when nothing is."""
    return state.bad or _wrong_bytes(m, state) or _unpublished(state) or _leaked(state)


def _wrong_bytes(m: Model, state: State) -> str:
    """I2: whatever an engine may read now is what the holder of the block wrote."""
    attached = state.engines[A]
    for worker, shard in enumerate(state.shards):
        if not attached.alive[worker] or attached.mapped[worker] != shard.memory:
            continue
        for sequence in attached.sequences:
            phase = sequence.phases[worker]
            # Its own blocks are read by the next step's kernel, which checks the lease; a launched read was checked.
            again = phase == DONE and sequence.status in (RUNNING, COMMITTED) and attached.age < 1
            if (again or (phase == LIVE and sequence.hit)) and shard.data[sequence.block] != sequence.tag:
                return f"wrong bytes: A reads {shard.data[sequence.block]!r} for {sequence.tag!r} on s{worker}"
    remote = state.engines[R]
    if not remote.alive[0]:
        return ""
    for sequence in remote.sequences:
        at, generation, grant = sequence.block, sequence.generation, sequence.grant
        for index in SHARDS:
            shard = state.shards[index]
            row, stamp = shard.rows[at], shard.stamps[at]
            if not (sequence.hit or sequence.phases[index] == DONE) or shard.fenced:
                continue
            old = shard.incarnation > grant.incarnation and m.on("incarnation in grants")
            if old and (at, generation) not in shard.tables:
                continue
            if grant.boots[index] != shard.boot and m.on("boot id on messages"):
                continue
            if grant.epoch != shard.epoch and m.on("pool epoch in grants"):
                continue
            if stamp > generation and m.on("stale generations are refused"):
                continue
            if row.generation != generation and m.on("stale generations are refused"):
                continue
            if stamp != row.generation and m.on("a row counts only with its stamp"):
                continue
            readable = row.digest or (row.filled and not sequence.hit)
            if readable and shard.data[at] != sequence.tag:
                return f"wrong bytes: R reads {shard.data[at]!r} for {sequence.tag!r} on s{index}"
    return ""


def _unpublished(state: State) -> str:
    """I3: what the control plane that the shards follow has indexed is sealed on every shard."""
    for control in state.controls:
        follows = control.mode == "ready" and all(
            (shard.boot, shard.incarnation) == (boot, control.incarnation)
            for shard, boot in zip(state.shards, control.boots, strict=True)
        )
        if not follows:
            continue
        for at, block in enumerate(control.blocks):
            rows = [shard.rows[at] for shard in state.shards]
            if block.digest and any((row.generation, row.digest) != (block.generation, block.digest) for row in rows):
                return f"a lost prefix: {block.digest} is indexed and not sealed on every shard"
            if block.digest and any(shard.data[at] != block.digest for shard in state.shards):
                return f"wrong bytes: {block.digest} is indexed, the shards have {[s.data[at] for s in state.shards]}"
    return ""


def _leaked(state: State) -> str:
    """I1, I8: a reference belongs to a session that the control plane still waits for, and an engine that has nothing
    and has read everything has no reference."""
    for control in state.controls:
        for at, block in enumerate(control.blocks):
            for index, _ in block.held | block.deferred:
                if control.sessions[index] == "none":
                    return f"leaked: b{at} is referenced by {NAMES[index]}, whose session is over"
                engine = state.engines[index]
                idle = not engine.sequences and not engine.inbox and engine.start == control.start
                if idle and control.sessions[index] == "open" and control.mode == "ready":
                    return f"leaked: b{at} is referenced by {NAMES[index]}, which has nothing"
    return ""
