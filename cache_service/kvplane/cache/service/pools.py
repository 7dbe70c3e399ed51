"""A pool and its shards: when it is open, its steps, its seals, and how its sessions end."""

from collections.abc import Callable, Mapping
from itertools import groupby
from time import perf_counter

import numpy as np
import structlog

from kvplane.cache.core import CacheCore, Chain, CoreConfig, Step, StepResult
from kvplane.cache.core.sequences import Status
from kvplane.cache.service import identities
from kvplane.cache.service.config import CacheConfig
from kvplane.cache.service.decode import Surroundings, decode_advance, decode_step, has_more, wire_fields
from kvplane.cache.service.encode import encode_preemption, encode_result, write_statistics
from kvplane.cache.service.grants import grant_of
from kvplane.cache.service.metrics import Metrics
from kvplane.cache.service.seals import SealPump
from kvplane.cache.service.sessions import EngineSession
from kvplane.cache.service.shards import Broadcast, ShardLink
from kvplane.v1 import cache_pb2, registry_pb2, step_pb2, types_pb2
from kvplane.wire.errors import (
    InvalidArgumentError,
    KvplaneError,
    PoolLostError,
    SessionExpiredError,
    UnavailableError,
    UnsupportedFeatureError,
)
from kvplane.wire.status import to_status

_log = structlog.get_logger(__name__)

_WAITING = (Status.WAITING, Status.PREEMPTED)

RETRY_SECONDS = 0.5
"""When asking a pool that is not open makes sense again."""


class HostedPool:
    """One pool. Time comes in as an argument, in seconds; `wake` asks for `pump` after a delay."""

    def __init__(
        self,
        template: registry_pb2.RegisterRequest,
        config: CacheConfig,
        metrics: Metrics,
        grant_key: bytes,
        wake: Callable[[float], None],
    ) -> None:
        self.pool_id = template.pool_id
        self.template = template
        self.grant_key = grant_key
        self.state: types_pb2.PoolState.ValueType = types_pb2.POOL_STATE_RECONCILING
        self.pool_epoch = 0
        self.incarnation = 1
        self.links: dict[int, ShardLink] = {}
        self.core: CacheCore | None = None
        self.sessions: dict[int, EngineSession] = {}
        self._config = config
        self.metrics = metrics
        self._wake = wake
        self._creating = False
        self.seals: SealPump | None = None

    # Shards and the pool's life

    @property
    def world_size(self) -> int:
        """How many shards make the pool."""
        return self.template.shard.world_size

    @property
    def complete(self) -> bool:
        """Whether every shard has a live control stream (I11)."""
        return len(self.links) == self.world_size and all(link.connected for link in self.links.values())

    def stream_opened(self, link: ShardLink) -> None:
        """A shard's control stream is there (again): the pool is created, or goes on."""
        _log.info("shard connected", pool=self.pool_id, rank=link.rank, boot_id=link.boot_id)
        if not self.complete:
            return
        if self.core is None:
            self._create()
        elif self.state == types_pb2.POOL_STATE_RECONCILING:
            self._set_state(types_pb2.POOL_STATE_READY, "all shards are connected")

    def stream_lost(self, link: ShardLink) -> None:
        """A control stream broke: nothing is allocated until it is back. The bytes are not lost."""
        link.lost()
        _log.warning("shard disconnected", pool=self.pool_id, rank=link.rank)
        if self.core is not None and self.state == types_pb2.POOL_STATE_READY:
            self._set_state(types_pb2.POOL_STATE_RECONCILING, f"shard {link.rank} is disconnected")

    def lose(self, reason: str) -> None:
        """The bytes of this epoch are gone: its sessions end, and a new epoch begins when all shards are there."""
        _log.error("pool lost", pool=self.pool_id, pool_epoch=self.pool_epoch, reason=reason)
        if self.core is not None:
            self._set_state(types_pb2.POOL_STATE_LOST, reason)
        error = PoolLostError(f"pool {self.pool_id} epoch {self.pool_epoch} is lost: {reason}")
        for session in self.sessions.values():
            if session.close_stream is not None:
                session.close_stream(error)
        self.sessions.clear()
        self.core, self.seals, self._creating = None, None, False
        for link in self.links.values():
            link.abandon(reason)
        self.state = types_pb2.POOL_STATE_RECONCILING
        if self.complete:
            self._create()

    def open_core(self) -> CacheCore:
        """The core of an open pool. Raises `UnavailableError`."""
        if self.core is None or self.state != types_pb2.POOL_STATE_READY:
            raise UnavailableError(
                f"pool {self.pool_id} is {types_pb2.PoolState.Name(self.state)}",
                reason=types_pb2.PoolState.Name(self.state).removeprefix("POOL_STATE_"),
                retry_after_seconds=RETRY_SECONDS,
            )
        return self.core

    def _create(self) -> None:
        if self._creating:
            return
        self._creating = True
        self.pool_epoch += 1
        num_blocks = min(link.register.max_blocks for link in self.links.values())
        for link in self.links.values():
            link.incarnation = self.incarnation
        create = registry_pb2.CreatePool(
            pool_epoch=self.pool_epoch,
            num_blocks=num_blocks,
            segments=[types_pb2.SegmentSpec(first_block=0, num_blocks=num_blocks)],
        )
        Broadcast(
            self.links.values(),
            registry_pb2.ControlResponse(create_pool=create),
            lambda done: self._created(done, num_blocks),
        )

    def _created(self, broadcast: Broadcast, num_blocks: int) -> None:
        self._creating = False
        if broadcast.failed:
            reasons = [command.ack.status.message for command in broadcast.commands if command.ack and command.failed]
            _log.error("pool not created", pool=self.pool_id, reasons=reasons)
            return
        self.core = CacheCore(
            CoreConfig(
                num_blocks=num_blocks,
                model=identities.model_identity(self.template.model, "model"),
                incarnation=self.incarnation,
                group=identities.group_spec(self.template.groups, "groups"),
                prefix_caching=self._config.prefix_caching,
                watermark=self._config.watermark,
                max_sequence_tokens=self._config.max_prompt_tokens,
            )
        )
        self.seals = SealPump(self, self.core, self._config.seal_interval_seconds, self._wake)
        self._set_state(types_pb2.POOL_STATE_READY, "created")

    def _set_state(self, state: "types_pb2.PoolState.ValueType", reason: str) -> None:
        self.state = state
        _log.info("pool state", pool=self.pool_id, state=types_pb2.PoolState.Name(state), reason=reason)
        if self.core is not None:
            self.core.set_ready(state == types_pb2.POOL_STATE_READY)
        notice = cache_pb2.PoolStateNotice(state=state, pool_epoch=self.pool_epoch, reason=reason)
        for session in self.sessions.values():
            session.notify(cache_pb2.Notice(pool_state=notice))
        command = registry_pb2.ControlResponse(pool_state=registry_pb2.PoolStateCommand(state=state))
        Broadcast(self.links.values(), command)

    def pump(self, now: float) -> None:
        """Send the next batch of seals, if there is one and it is due."""
        if self.seals is not None:
            self.seals.pump(now)

    # Steps

    def step(
        self, session: EngineSession, message: step_pb2.Step, chains: Mapping[int, Chain], now: float
    ) -> cache_pb2.StepResponse:
        """Apply a step, or say why not. Raises only what ends the stream: the session or the pool is gone."""
        stored = session.answers.get(message.step_id)
        if stored is not None:
            return stored
        core, seals = self.core, self.seals
        if core is None or seals is None:
            raise PoolLostError(f"pool {self.pool_id} has no bytes any more")
        started = perf_counter()
        try:
            step = self._decode(session, message, chains)
            decoded = perf_counter()
            result = core.step(session.session_id, step, now)
        except KvplaneError as error:
            if isinstance(error, SessionExpiredError):
                raise
            return self._rejected(core, session, message, error, now)
        applied = perf_counter()
        session.note_applied(message)
        if result.preemptions:
            self._revoke(session, result)
        if seals.idle:
            session.published_step = message.step_id
        response = session.respond()
        encode_result(response.result, result, session.session_id, session.published_step)
        if session.mode == types_pb2.SESSION_MODE_REMOTE:
            grant_of(self, session, response.result, message)
        session.answers[message.step_id] = response
        encoded = perf_counter()
        seconds = self.metrics.step_seconds
        seconds.observe("decode", decoded - started)
        seconds.observe("core", applied - decoded)
        seconds.observe("encode", encoded - applied)
        seals.pump_soon(now)
        return response

    def _decode(self, session: EngineSession, message: step_pb2.Step, chains: Mapping[int, Chain]) -> Step:
        completed = session.completed_step(message.completed_steps)
        packed = message.acknowledged_revocations
        if not packed and not has_more(message):
            return decode_advance(message, completed)
        around = Surroundings(
            self.template.model.block_tokens,
            session.namespace_id,
            completed,
            session.drained_sequences(packed) if packed else (),
            chains,
        )
        return decode_step(message, around)

    def _rejected(
        self, core: CacheCore, session: EngineSession, message: step_pb2.Step, error: KvplaneError, now: float
    ) -> cache_pb2.StepResponse:
        """The answer to a refused step. Its id is spent unless it was not the next one."""
        ledger = session.core.ledger
        if ledger.newest_step < message.step_id and isinstance(error, InvalidArgumentError | UnsupportedFeatureError):
            try:
                error = core.reject(session.session_id, message.step_id, message.last_seen_step, error, now)
            except KvplaneError as refused:
                error = refused
        if isinstance(error, InvalidArgumentError) and not any(
            violation.field.startswith("step.") for violation in error.violations
        ):
            error = wire_fields(error)
        response = session.respond()
        response.rejected.CopyFrom(step_pb2.RejectedStep(step_id=message.step_id, status=to_status(error)))
        if ledger.newest_step == message.step_id:
            session.answers[message.step_id] = response
        self.metrics.rejected_steps.labels(error.reason).inc()
        _log.warning(
            "step rejected",
            session=session.session_id,
            step=message.step_id,
            reason=error.reason,
            message=error.message,
        )
        return response

    def _revoke(self, session: EngineSession, result: StepResult) -> None:
        """Victims of other sessions get a notice on their own stream."""
        for preemption in result.preemptions:
            self.metrics.preempted(preemption)
        others = [each for each in result.preemptions if each.session_id != session.session_id]
        others.sort(key=lambda each: each.session_id)
        for session_id, victims in groupby(others, key=lambda each: each.session_id):
            if session_id in self.sessions:
                self.sessions[session_id].revoke([encode_preemption(each, with_beneficiary=False) for each in victims])

    # The end of sessions

    def end_session(self, session: EngineSession, error: KvplaneError, *, drained: bool = False) -> None:
        """End a lease; its blocks are back once all shards have fenced it and its processes are gone."""
        core = self.core
        if core is None or session.core.ended:
            return
        core.end_session(session.session_id)
        if session.close_stream is not None:
            session.close_stream(error)
        if drained and session.mode == types_pb2.SESSION_MODE_ATTACHED:
            self._drained(session)
            return
        fence = registry_pb2.FenceSession(session_id=session.session_id, lease_epoch=session.lease_epoch)
        Broadcast(
            self.links.values(),
            registry_pb2.ControlResponse(fence_session=fence),
            lambda done: self._fenced(session, done),
        )

    def process_gone(self, session_id: int, process: tuple[int, int, int]) -> None:
        """A shard has seen a process of a session end. Without any left, the session is over at once."""
        session = self.sessions.get(session_id)
        if session is None or process not in session.processes:
            return
        session.processes.discard(process)
        if not session.processes:
            _log.info("engine gone", session=session_id, pool=self.pool_id)
            if session.core.ended:
                self._drained(session)
            else:
                self.end_session(session, PoolLostError("the engine's processes are gone"), drained=True)

    def _fenced(self, session: EngineSession, broadcast: Broadcast) -> None:
        if broadcast.failed:
            return
        if session.mode == types_pb2.SESSION_MODE_ATTACHED and session.processes:
            return
        self._drained(session)

    def _drained(self, session: EngineSession) -> None:
        if self.core is None or self.sessions.pop(session.session_id, None) is None:
            return
        self.core.session_drained(session.session_id)
        forget = registry_pb2.ForgetSession(session_id=session.session_id, lease_epoch=session.lease_epoch)
        Broadcast(self.links.values(), registry_pb2.ControlResponse(forget_session=forget))

    # Description

    def stats(self) -> types_pb2.PoolStats:
        """Counters, all zero before the pool is created."""
        stats = types_pb2.PoolStats()
        if self.core is not None:
            state = self.core.state
            write_statistics(stats, self.core.statistics())
            stats.running_sequences = state.running
            stats.waiting_sequences = int(np.count_nonzero(np.isin(state.rows.status, _WAITING)))
        return stats

    def describe(self) -> types_pb2.Pool:
        """The pool as it is now."""
        template = self.template
        return types_pb2.Pool(
            pool_id=self.pool_id,
            pool_epoch=self.pool_epoch,
            state=self.state,
            incarnation=self.incarnation,
            model=template.model,
            layout=template.layout,
            groups=template.groups,
            shards=[
                types_pb2.Shard(
                    rank=link.rank,
                    address=link.register.address,
                    boot_id=link.boot_id,
                    connected=link.connected,
                    spec=link.register.shard,
                )
                for link in sorted(self.links.values(), key=lambda link: link.rank)
            ],
            num_blocks=self.core.config.num_blocks if self.core else 0,
            max_sequences=self._config.max_sequences,
            stats=self.stats(),
        )
