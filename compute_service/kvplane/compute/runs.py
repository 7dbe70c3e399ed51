"""Plans and runs of a remote session, as jobs of the device thread: everything is checked, then everything is done."""

import time
from dataclasses import dataclass, field

import torch

from kvplane import kernels
from kvplane.compute.arenas import Arenas
from kvplane.compute.copies import run_copies
from kvplane.compute.grants import apply_grants
from kvplane.compute.layout import ROLES, PoolLayout
from kvplane.compute.metrics import Totals
from kvplane.compute.plans import Batch, OpenPlan, batch_of, check_options, check_read, shape_of
from kvplane.compute.sessions import Session
from kvplane.compute.state import Holding, ShardState
from kvplane.compute.tensors import Result, RunTensors
from kvplane.kernels import AttentionPlan, PagedKv
from kvplane.v1 import compute_pb2, types_pb2
from kvplane.wire.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    LimitExceededError,
    NotGrantedError,
    PoolLostError,
)

OPEN_PLANS = 16
"""Plans that a session may have open."""

MAX_PLACES = 1024
"""Checked places that a stream remembers."""

_WRITES = (compute_pb2.RUN_KIND_WRITE, compute_pb2.RUN_KIND_WRITE_AND_ATTEND)
_ATTENDS = (compute_pb2.RUN_KIND_ATTEND, compute_pb2.RUN_KIND_WRITE_AND_ATTEND)


@dataclass(slots=True, eq=False)
class Stream:
    """One Execute stream of a session."""

    stream_id: int
    session: Session
    lease_epoch: int
    holding: Holding
    """Pool that the stream was opened on; its plans end with it."""
    last_plan: int = 0
    usual_heads: int | None = None
    """Query heads of the newest run: a plan is prepared for as many before its first run comes."""
    places: "dict[_Place, _Tensors]" = field(default_factory=dict)
    """Tensors in arenas that were checked before: engines use the same few places again and again."""
    places_under: int = 0
    """Count of closed arenas at which they were."""


_Place = tuple[int, int, bytes]
"""Kind of run, new tokens, encoded tensors."""


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A run's tensors, all checked."""

    num_query_heads: int
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    query: torch.Tensor | None = None
    out: Result | None = None
    lse: Result | None = None
    results: tuple[Result, ...] = ()


class Runs:
    """What remote sessions execute on this shard."""

    def __init__(self, state: ShardState, arenas: Arenas, totals: Totals) -> None:
        self._state = state
        self._totals = totals
        self._arenas = arenas
        self._device = state.identity.device

    def open_plan(self, stream: Stream, plan: compute_pb2.Plan, deadline: float | None) -> int:
        """Apply the plan's grants, check it and pin its blocks; returns the newest grant's number."""
        session, holding = self._bound(stream)
        self._state.admitting()
        if plan.plan_id <= stream.last_plan:
            raise InvalidArgumentError.of("plan.plan_id", f"{plan.plan_id} does not rise above {stream.last_plan}")
        if len(session.plans) >= OPEN_PLANS:
            raise LimitExceededError(
                f"{len(session.plans)} plans of the session are open",
                metadata={"limit": "open_plans", "value": str(OPEN_PLANS)},
                retry_after_seconds=0.01,
            )
        check_options(plan.options, "plan.options")
        last_grant = apply_grants(self._state, session, plan.grants)
        run_copies(holding, session)
        layout = holding.pool.layout
        batch = batch_of(plan, session.tables, layout, session.max_sequences)
        check_read(holding.occupancy, batch, session.session_id, with_appended=False)
        opened = OpenPlan(batch, plan.options, deadline)
        if stream.usual_heads is not None and batch.num_tokens:
            geometry = holding.pool.layers[layout.layers[0]].geometry
            opened.kernel_plan(shape_of(plan.options, stream.usual_heads), geometry, layout.window_tokens)
        holding.occupancy.pin(batch.ids)
        session.plans[stream.stream_id, plan.plan_id] = opened
        stream.last_plan = plan.plan_id
        return last_grant

    def apply_grants(self, stream: Stream, request: compute_pb2.ApplyGrants) -> int:
        """Apply grants without a plan; returns the newest number."""
        session, _ = self._bound(stream)
        return apply_grants(self._state, session, request.grants)

    def run(self, stream: Stream, run: compute_pb2.Run) -> tuple[Result, ...]:
        """Execute one layer and return its results. A refusal is raised before anything is written."""
        session, holding = self._bound(stream)
        plan = session.plans.get((stream.stream_id, run.plan_id))
        if plan is None:
            raise InvalidArgumentError.of("run.plan_id", f"{run.plan_id} is not open in this stream")
        if plan.ended:
            raise NotGrantedError(f"a sequence of plan {run.plan_id} was released or reset")
        if plan.deadline is not None and time.monotonic() > plan.deadline:
            raise DeadlineExceededError("the plan's deadline has passed")
        layer, layout = holding.pool.layers.get(run.layer), holding.pool.layout
        if layer is None:
            raise InvalidArgumentError.of("run.layer", f"{run.layer} is not held by this shard")
        if run.kind not in _WRITES and run.kind not in _ATTENDS:
            raise InvalidArgumentError.of("run.kind", "is not set")
        batch = plan.batch
        tensors = self._placed(stream, run, batch.num_tokens)
        if plan.usual is not None and plan.usual[0] == tensors.num_query_heads and not run.HasField("options"):
            prepared = plan.usual[1]
        else:
            options = run.options if run.HasField("options") else plan.options
            check_options(options, "run.options")
            shape = shape_of(options, tensors.num_query_heads)
            prepared = plan.kernel_plan(shape, layer.geometry, layout.window_tokens)
            if not run.HasField("options"):
                plan.usual = (tensors.num_query_heads, prepared)
        unchanged = self._check_blocks(run, session, holding, plan)
        if tensors.key is not None and tensors.value is not None:
            if not unchanged:
                holding.occupancy.occupy(batch.written_ids, batch.written_generations, session.session_id)
            kernels.write(prepared, self._device.inbound(tensors.key), self._device.inbound(tensors.value), layer)
            plan.written_layers.add(run.layer)
            if len(plan.written_layers) == len(layout.layers):
                holding.occupancy.fill(batch.written_ids, batch.write_ends)
        if tensors.query is not None and tensors.out is not None:
            self._attend(prepared, tensors, layer, holding, batch)
            stream.usual_heads = tensors.num_query_heads
        self._count(batch, layout, wrote=tensors.key is not None, attended=tensors.query is not None)
        return tensors.results

    def _attend(
        self, prepared: AttentionPlan, tensors: _Tensors, layer: PagedKv, holding: Holding, batch: Batch
    ) -> None:
        assert tensors.query is not None
        assert tensors.out is not None
        out = tensors.out.tensor
        lse = None if tensors.lse is None else tensors.lse.tensor
        if self._device.is_host and not holding.processes.some():
            kernels.attend(prepared, tensors.query, layer, out=out, lse=lse)
            return
        # An attached process may begin a new occupant while the kernel reads. Stamps come before bytes, so looking once
        # more shows it; until then nobody sees the result.
        query = self._device.inbound(tensors.query)
        dtype = out.dtype if self._device.is_host else query.dtype
        seen = torch.empty(query.shape, dtype=dtype, device=query.device)
        seen_lse = None if lse is None else torch.empty(lse.shape, dtype=lse.dtype, device=query.device)
        kernels.attend(prepared, query, layer, out=seen, lse=seen_lse)
        results = [(out, self._device.outbound(seen))]
        if lse is not None and seen_lse is not None:
            results.append((lse, self._device.outbound(seen_lse)))
        holding.occupancy.check_current(batch.ids, batch.generations)
        for wanted, found in results:
            wanted.copy_(found)

    def _count(self, batch: Batch, layout: PoolLayout, *, wrote: bool, attended: bool) -> None:
        totals, token_bytes = self._totals, len(ROLES) * layout.role_block_bytes // layout.block_tokens
        totals.runs += 1
        if wrote:
            totals.written_bytes += batch.num_tokens * token_bytes
        if attended:
            totals.read_bytes += batch.num_seen * token_bytes
            totals.attended_tokens += batch.num_tokens

    def close_plan(self, stream: Stream, plan_id: int) -> None:
        """End a plan. Everything it launched has completed, since the thread runs one job after the other."""
        plan = stream.session.plans.pop((stream.stream_id, plan_id), None)
        if plan is None:
            raise InvalidArgumentError.of("close.plan_id", f"{plan_id} is not open in this stream")
        if not plan.ended:
            stream.holding.occupancy.unpin(plan.batch.ids)

    def close_stream(self, stream: Stream) -> None:
        """End all plans of a stream."""
        for stream_id, plan_id in list(stream.session.plans):
            if stream_id == stream.stream_id:
                self.close_plan(stream, plan_id)

    def _bound(self, stream: Stream) -> tuple[Session, Holding]:
        holding = self._state.held()
        if holding is not stream.holding:
            raise PoolLostError(f"the pool that session {stream.session.session_id} ran on is gone")
        stream.session.check(stream.lease_epoch)
        return stream.session, holding

    def _placed(self, stream: Stream, run: compute_pb2.Run, tokens: int) -> _Tensors:
        """The run's tensors, made anew unless the same places of arenas were checked before."""
        if stream.places_under != self._arenas.closed or len(stream.places) >= MAX_PLACES:
            stream.places.clear()
            stream.places_under = self._arenas.closed
        place = (run.kind, tokens, b"".join([tensor.SerializeToString() for tensor in run.tensors]))
        found = stream.places.get(place)
        if found is None:
            given = RunTensors(run.tensors, self._arenas, stream.session.session_id)
            found = self._tensors(given, run, stream.holding, tokens)
            if given.in_arenas:
                stream.places[place] = found
        return found

    def _tensors(self, given: RunTensors, run: compute_pb2.Run, holding: Holding, tokens: int) -> _Tensors:
        layout = holding.pool.layout
        key = value = query = out = lse = None
        heads = layout.num_kv_heads
        if run.kind in _ATTENDS:
            heads = given.query_shape()[1]
            query = given.take(types_pb2.TENSOR_ROLE_QUERY, (tokens, heads, layout.head_dim))
            out = given.result(types_pb2.TENSOR_ROLE_OUTPUT, tuple(query.shape), query.dtype, wanted=True)
            lse = given.result(types_pb2.TENSOR_ROLE_LSE, (tokens, heads), query.dtype, wanted=False)
        if run.kind in _WRITES:
            rows = (tokens, layout.num_kv_heads, layout.head_dim)
            key = given.take(types_pb2.TENSOR_ROLE_KEY, rows, layout.dtype)
            value = given.take(types_pb2.TENSOR_ROLE_VALUE, rows, layout.dtype)
        given.check_overlap()
        results = tuple(result for result in (out, lse) if result is not None)
        return _Tensors(heads, key, value, query, out, lse, results)

    def _check_blocks(self, run: compute_pb2.Run, session: Session, holding: Holding, plan: OpenPlan) -> bool:
        """Whether nothing has changed since a run of the same kind, which has occupied the blocks then."""
        batch, occupancy = plan.batch, holding.occupancy
        reads_appended = run.kind == compute_pb2.RUN_KIND_ATTEND and run.layer not in plan.written_layers
        kind = (run.kind in _WRITES, reads_appended)
        if plan.checked.get(kind) == occupancy.changes:
            # Nothing that this process did has changed the answer since. Attached processes, if any, write stamps.
            if holding.processes.some():
                occupancy.check_current(batch.ids, batch.generations)
            return True
        check_read(occupancy, batch, session.session_id, with_appended=reads_appended)
        if run.kind in _WRITES:
            occupancy.check_writable(
                batch.written_ids, batch.written_generations, batch.write_starts, session.session_id
            )
            occupancy.check_unpinned(batch.written_ids, batch.written_generations, session.pinned())
        plan.checked[kind] = occupancy.changes
        return False
