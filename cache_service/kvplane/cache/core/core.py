"""`CacheCore`: one pool's state machine, as its service, the replay tool and the tests use it."""

from collections.abc import Sequence

import numpy as np

from kvplane.cache.core import adoption, chains, declarations, growth, recovery
from kvplane.cache.core import tokens as token_ops
from kvplane.cache.core.arrays import I64, U8, U32, U64, Bools
from kvplane.cache.core.blocks import BlockPool
from kvplane.cache.core.chains import Chain, Namespaces
from kvplane.cache.core.columns import BlockColumns
from kvplane.cache.core.config import CoreConfig
from kvplane.cache.core.declarations import Declaration
from kvplane.cache.core.eviction import EvictionPolicy, LeastRecentlyUsed
from kvplane.cache.core.extents import Extents
from kvplane.cache.core.groups import rules_for
from kvplane.cache.core.integrity import check_integrity
from kvplane.cache.core.preemption import LatestArrival, PreemptionPolicy
from kvplane.cache.core.prefix_index import PrefixIndex
from kvplane.cache.core.quiescence import DeferredReleases
from kvplane.cache.core.recovery import Survivors
from kvplane.cache.core.requests import Step
from kvplane.cache.core.results import Cut, PoolStatistics, StepResult
from kvplane.cache.core.sealing import SealBatch, Sealing
from kvplane.cache.core.sequences import NEVER, SequenceRows, Status
from kvplane.cache.core.sessions import DEFAULT_TTL_SECONDS, MAX_TTL_SECONDS, MIN_TTL_SECONDS, Session
from kvplane.cache.core.state import PoolState
from kvplane.cache.core.steps import apply_step
from kvplane.wire.digests import ExtraKey
from kvplane.wire.errors import InvalidArgumentError, KvplaneError, NotFoundError, SessionExpiredError
from kvplane.wire.identity import Namespace


class CacheCore:
    """All decisions of one pool. Deterministic (I10): time comes in as an argument, in seconds.

    Every method either does the whole of what it says or raises and changes nothing (I6).
    """

    def __init__(
        self,
        config: CoreConfig,
        eviction: type[EvictionPolicy] | None = None,
        preemption: PreemptionPolicy | None = None,
    ) -> None:
        rules = rules_for(config.group, config.block_tokens, config.max_new_blocks_per_sequence)
        columns = BlockColumns(config.num_blocks, config.incarnation)
        policy = (eviction or LeastRecentlyUsed)(columns)
        index = PrefixIndex(columns.digest)
        pool = BlockPool(columns, index, policy, config.incarnation)
        namespaces = Namespaces(config.model)
        self._state = PoolState(
            config=config,
            rules=rules,
            columns=columns,
            pool=pool,
            preemption_policy=preemption or LatestArrival(),
            namespaces=namespaces,
            rows=SequenceRows(
                config.block_tokens,
                config.max_sequence_tokens,
                Extents(config.block_tokens, 2 * config.num_blocks),
            ),
            sealing=Sealing(pool, namespaces, rules.prefix_closed),
        )
        self._last_session = 0
        self._returned_rows: dict[int, list[int]] = {}

    @property
    def config(self) -> CoreConfig:
        """What the pool was configured with."""
        return self._state.config

    @property
    def state(self) -> PoolState:
        """The parts of the pool, for reading: metrics, explanations, tests."""
        return self._state

    def statistics(self) -> PoolStatistics:
        """Blocks by state and totals."""
        self.settle()
        return self._state.statistics()

    def check_integrity(self) -> None:
        """Prove I1, I4, I5 and I9 from scratch. Raises `InternalError`; O(pool)."""
        self.settle()
        check_integrity(self._state)

    def set_ready(self, ready: bool) -> None:
        """Whether every shard has a live control stream (I11): while not, nothing is allocated."""
        self._state.ready = ready

    # Sessions

    def open_session(
        self,
        now: float,
        max_sequences: int = 1024,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        session_id: int | None = None,
    ) -> Session:
        """A new session with a lease that ends `ttl_seconds` after its last message.

        `session_id` is the caller's, unused so far; None: the next number.
        """
        if not 1 <= max_sequences <= 1 << 20:
            raise InvalidArgumentError.of("max_sequences", "must be between 1 and 2^20")
        if not MIN_TTL_SECONDS <= ttl_seconds <= MAX_TTL_SECONDS:
            raise InvalidArgumentError.of("ttl_seconds", f"must be between {MIN_TTL_SECONDS} and {MAX_TTL_SECONDS}")
        state, rows = self._state, self._state.rows
        returned = self._returned_rows.get(max_sequences)
        if returned:
            first_row = returned.pop()
            rows.serial[first_row : first_row + max_sequences] = 0
        else:
            first_row = len(rows.records)
            rows.grow(first_row + max_sequences)
        self._last_session += 1
        session = Session(
            session_id or self._last_session,
            first_row,
            max_sequences,
            ttl_seconds,
            now + ttl_seconds,
            DeferredReleases(state.pool),
        )
        state.sessions[session.session_id] = session
        return session

    def renew(self, session_id: int, now: float) -> None:
        """A heartbeat arrived. Raises `SessionExpiredError` when the lease is over."""
        self._session(session_id, now).renew(now)

    def expired(self, now: float) -> list[int]:
        """Sessions whose lease has run out; the caller ends them."""
        sessions = self._state.sessions.values()
        return [each.session_id for each in sessions if not each.ended and each.expires_at <= now]

    def end_session(self, session_id: int) -> None:
        """End a lease: its sequences finish, their blocks are deferred until `session_drained` (I8, I9)."""
        state = self._state
        session = state.sessions.get(session_id)
        if session is None:
            raise SessionExpiredError(f"session {session_id} is gone")
        if session.ended:
            return
        self.settle()
        window = slice(session.first_row, session.first_row + session.max_sequences)
        for row in (np.flatnonzero(state.rows.status[window]) + session.first_row).tolist():
            if state.rows.status[row] == Status.RUNNING:
                session.deferred.release(growth.stop(state, row), NEVER)
            state.refused.pop(state.rows.record(row).sequence_id, None)
            state.rows.close(row)
        session.ended = True

    def session_drained(self, session_id: int) -> None:
        """Every shard has fenced and drained an ended session, or has seen its processes gone."""
        state = self._state
        session = state.sessions.get(session_id)
        if session is None:
            raise SessionExpiredError(f"session {session_id} is gone")
        if not session.ended:
            raise InvalidArgumentError.of("session_id", f"session {session_id} has not ended")
        self.settle()
        session.deferred.drain()
        for op_id in [each for each, copy in state.copies.items() if copy.session_id == session_id]:
            state.pool.release(state.copies.pop(op_id).pinned)
        del state.sessions[session_id]
        self._returned_rows.setdefault(session.max_sequences, []).append(session.first_row)

    # Steps and seals

    def step(self, session_id: int, step: Step, now: float) -> StepResult:
        """Apply a step exactly once (I7): a repeated id returns the stored result or raises the stored error.

        Raises `InvalidArgumentError` (the step is malformed; its id is spent, nothing changed),
        `PriorStepRejectedError`, `StepOutOfOrderError`, `LimitExceededError`, `SessionExpiredError`.
        """
        session = self._session(session_id, now)
        stored = session.ledger.begin(step.step_id, step.last_seen_step)
        session.renew(now)
        if isinstance(stored, KvplaneError):
            raise stored
        if stored is not None:
            return stored
        try:
            result = apply_step(self._state, session, step, now)
        except (InvalidArgumentError, NotFoundError) as error:
            session.ledger.reject(step.step_id, error)
            raise
        return session.ledger.accept(step.step_id, result)

    def reject(
        self, session_id: int, step_id: int, last_seen_step: int, error: KvplaneError, now: float
    ) -> KvplaneError:
        """Spend the id of a step that could not be read, so that steps sent behind it are rejected too (I6).

        Returns the error to answer with. Raises like `step` when the id is not the next one.
        """
        session = self._session(session_id, now)
        stored = session.ledger.begin(step_id, last_seen_step)
        session.renew(now)
        if isinstance(stored, KvplaneError):
            return stored
        if stored is not None:
            return error
        return session.ledger.reject(step_id, error)

    def take_seals(self) -> SealBatch | None:
        """Blocks filled since the last call, for the shards to seal; None when there are none."""
        return self._state.sealing.take()

    def acknowledge_seals(self, seal_id: int, sealed: Bools | None = None) -> None:
        """All shards have sealed a batch (`sealed[i]` says which blocks; None: all): publish (I3)."""
        for sequence, end in self._state.sealing.acknowledge(seal_id, sealed):
            if sequence.frontier is not None and sequence.frontier < end:
                self._state.set_frontier(sequence, end)

    def settle(self) -> None:
        """Index what is acknowledged now, and not when somebody looks.

        No decision depends on it. Until then a block that only a duplicate will hold does not count as held.
        """
        self._state.sealing.settle()

    # Namespaces and the index

    def register_namespace(self, namespace: Namespace, version: int = 0) -> int:
        """`namespace_id` of a namespace; registering it again returns the same one."""
        return self._state.namespaces.register(namespace, version)

    def hash_prompt(
        self,
        namespace_id: int,
        tokens: bytes,
        extra_keys: dict[int, tuple[ExtraKey, ...]] | None = None,
        chain: Chain | None = None,
        max_blocks: int | None = None,
    ) -> Chain:
        """Hash a prompt ahead of its admission, `max_blocks` more per call when `chain` is passed back in."""
        start = chain or self._state.namespaces.chain(namespace_id)
        return chains.extend(start, tokens, self.config.block_tokens, extra_keys, max_blocks)

    def lookup(self, chain: Chain) -> int:
        """Tokens of `chain` that would hit now. Protects nothing."""
        self.settle()
        state = self._state
        if state.rules.prefix_closed:
            return state.pool.index.longest_prefix(chain.blob, len(chain)) * self.config.block_tokens
        found = state.pool.index.find_all(chain.array(len(chain)))
        return state.rules.longest_hit(found != 0)[0] * self.config.block_tokens

    def reset(self, namespace_id: int | None = None, version: int | None = None) -> int:
        """Make all that is published in a namespace (None: in all) unhittable; returns blocks unindexed.

        Always succeeds: running sequences keep their blocks, but publish nothing more, and waiting ones are
        hashed again. Seals under way lose their parents or their root and are not published.
        """
        self.settle()
        state = self._state
        spaces = range(len(state.namespaces)) if namespace_id is None else [namespace_id]
        for space in spaces:
            state.namespaces.raise_version(space, version)
        state.sealing.resets += 1
        columns, rows = state.columns, state.rows
        # Block 0 counts as indexed, and is nobody's.
        affected = columns.indexed if namespace_id is None else columns.indexed & (columns.namespace == namespace_id)
        ids = np.flatnonzero(affected)[1 if affected[0] else 0 :]
        state.pool.unindex(ids)
        for row in np.flatnonzero(rows.status != Status.FREE).tolist():
            if namespace_id is None or rows.namespace[row] == namespace_id:
                sequence = rows.record(row)
                state.set_frontier(sequence, None)
                rows.next_fill[row] = NEVER
                if rows.status[row] != Status.RUNNING:
                    token_ops.rechain(state, row, sequence.tokens)
        return len(ids)

    def restore(
        self,
        block_ids: U32,
        generations: U64,
        digests: U8,
        parent_digests: U8,
        depths: U32,
        namespace_ids: U32,
    ) -> int:
        """Index blocks that survived a restart of the control plane; the pool must be untouched.

        Rows [n] and [n, 32], least recently used first. Rows whose digest came before or whose ancestors
        are missing are left out (I4): their blocks are free. Returns how many blocks are cached now.
        """
        return self._state.pool.restore(
            block_ids.astype(np.int64),
            generations,
            digests,
            parent_digests,
            depths,
            namespace_ids,
            self._state.rules.prefix_closed,
        )

    # Recovery from a restart of the control plane, in this order

    def restore_namespaces(self, namespaces: Sequence[tuple[Namespace, int]]) -> None:
        """Register namespaces with their versions, in the order of their ids, before anything else is done."""
        self._state.namespaces.restore(namespaces)

    def survive(self, survivors: Survivors) -> int:
        """Take over what the shards of a pool have kept; the pool must be untouched, its namespaces registered. Returns
        how many blocks are cached now. Nothing may be allocated (`set_ready`) until `conclude`."""
        return recovery.survive(self._state, survivors)

    def adopt(self, session_id: int, declaration: Declaration, now: float) -> tuple[Cut, ...]:
        """Take over what a session that was opened again holds, once; returns what is cut of it. It renews the lease.

        Raises `InvalidArgumentError`, `NotFoundError`, `SessionExpiredError`.
        """
        session = self._session(session_id, now)
        self.settle()
        declarations.check(self._state, session, declaration)
        session.renew(now)
        return adoption.adopt(self._state, session, declaration, now)

    def defer_held(self, session_id: int, block_ids: I64) -> None:
        """Keep blocks that an ended session may still touch until `session_drained`."""
        session = self._state.sessions.get(session_id)
        if session is None:
            raise SessionExpiredError(f"session {session_id} is gone")
        self.settle()
        recovery.defer_held(self._state, session, block_ids)

    def conclude(self, newest: U64) -> int:
        """End the recovery. `newest` [num_blocks] are the newest stamps of all shards, read again: what was stamped
        since it began cannot be hit any more. Returns how many blocks were unindexed."""
        self.settle()
        return recovery.conclude(self._state, newest)

    def _session(self, session_id: int, now: float) -> Session:
        session = self._state.sessions.get(session_id)
        if session is None or session.ended or session.expires_at <= now:
            raise SessionExpiredError(f"session {session_id} is gone, or its lease is over")
        return session
