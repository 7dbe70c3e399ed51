"""Which tokens are computed next, and what the cache service is told about it, one step ahead.

Iteration i: `plan` writes step i (tokens sampled and KV written by forward pass i-1, slots for forward pass i+1,
requests that may start) and picks the batch of forward pass i from slots that the results up to i-1 granted. The
engine sends the step, runs the batch, and hands the step's result to the queues. So no forward pass waits for the
cache service.
"""

import numpy as np

from kvplane.client.draft import StepDraft
from kvplane.client.integrations.transformers.batch import Batch, flatten
from kvplane.client.integrations.transformers.queues import Queues
from kvplane.client.integrations.transformers.requests import FinishedBy
from kvplane.client.integrations.transformers.sequence import Phase, Sequence
from kvplane.client.sequences import SequenceTable
from kvplane.client.values import FinishReason

_REASONS = {
    FinishedBy.STOP: FinishReason.STOP,
    FinishedBy.LENGTH: FinishReason.LENGTH,
    FinishedBy.ABORT: FinishReason.ABORT,
}
_ASKED_AT_ONCE = 32
"""Waiting sequences that a step names: enough to fill a batch, few enough to be cheap when thousands wait."""


class Scheduler:
    """First come, first served, by priority; decoding before prefill; prefill in chunks that fill the token budget."""

    def __init__(self, table: SequenceTable, queues: Queues, max_batch_tokens: int, max_running: int) -> None:
        self._table = table
        self._queues = queues
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running

    def plan(self, step: StepDraft) -> Batch | None:
        """Write the step; returns the batch to run meanwhile, None when no sequence can compute anything."""
        forking = self._fork(step)
        self._finish(step)
        sequences, counts, ahead = self._running(step, forking)
        self._admit(step, self._max_batch_tokens - ahead)
        return flatten(sequences, counts) if sequences else None

    def _running(self, step: StepDraft, forking: set[Sequence]) -> tuple[list[Sequence], list[int], int]:
        """Report and reserve for running sequences; the batch, and how many tokens the next one has already."""
        queues, num_slots = self._queues, self._table.num_slots
        budget = self._max_batch_tokens - sum(each.known == each.computed + 1 for each in queues.running)
        decoding: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
        commits: tuple[list[int], list[int]] = ([], [])
        extends: tuple[list[int], list[int]] = ([], [])
        singles: list[Sequence] = []
        chunks: list[Sequence] = []
        counts: list[int] = []
        ahead = 0
        for each in queues.running:
            slots, known, computed = int(num_slots[each.row]), each.known, each.computed
            pending = known - computed
            count = min(pending, slots - computed)
            if pending == 1:
                if count > 0:
                    singles.append(each)
            elif (count := min(count, budget)) > 0:
                budget -= count
                chunks.append(each)
                counts.append(count)
            else:
                count = 0
            after = computed + max(count, 0)
            if after < known:
                wanted = min(known, after + self._max_batch_tokens)
                ahead += wanted - after
            else:
                wanted = known + (known + 1 < each.limit)
                ahead += 1
            unreported = known - each.reported
            if unreported == 1 and each not in forking:
                for column, value in zip(
                    decoding, (each.sequence_id, int(each.tokens[known - 1]), computed, wanted), strict=True
                ):
                    column.append(value)
                each.reported, each.committed = known, computed
                continue
            if unreported and each not in forking:
                self._observe(step, each)
            if computed > each.committed:
                commits[0].append(each.sequence_id)
                commits[1].append(computed)
                each.committed = computed
            if wanted > slots:
                extends[0].append(each.sequence_id)
                extends[1].append(wanted)
        if decoding[0]:
            step.advance(np.array(decoding[0], np.uint64), *(np.array(each, np.uint32) for each in decoding[1:]))
        if commits[0]:
            step.commit(np.array(commits[0], np.uint64), np.array(commits[1], np.uint32))
        if extends[0]:
            step.extend(np.array(extends[0], np.uint64), np.array(extends[1], np.uint32))
        return singles + chunks, [1] * len(singles) + counts, ahead

    def _fork(self, step: StepDraft) -> set[Sequence]:
        """Split sequences whose prompt was just computed; children start with its blocks and a token of their own."""
        queues, forking = self._queues, set[Sequence]()
        forks, queues.forks = queues.forks, []
        for parent, children in forks:
            if parent.phase is not Phase.RUNNING or queues.free_rows < len(children):
                # The prompt is known to the pool by now: they hit what is left of it.
                for child in children:
                    queues.wait(child)
                continue
            # A child begins with what its parent has reported: not with the token just sampled for the parent.
            forking.add(parent)
            prompt = parent.computed
            if parent.committed < prompt:
                step.commit(parent.sequence_id, prompt)
                parent.committed = prompt
            ids = step.fork(parent.sequence_id, len(children))
            step.extend(ids, np.full(len(ids), prompt + 1, np.uint32))
            for child, sequence_id in zip(children, ids, strict=True):
                queues.introduced(child, sequence_id, Phase.FORKING)
                child.computed = child.committed = child.reported = prompt
        return forking

    def _finish(self, step: StepDraft) -> None:
        ended = self._queues.finish_sent()
        for sequence in ended:
            if sequence.phase is Phase.RUNNING:
                # What was computed to the end is published as well: the next turn of a conversation hits it.
                if sequence.reported < sequence.computed:
                    self._observe(step, sequence)
                if sequence.committed < sequence.computed:
                    step.commit(sequence.sequence_id, sequence.computed)
        for reason in {sequence.finished_by for sequence in ended}:
            ids = [sequence.sequence_id for sequence in ended if sequence.finished_by is reason]
            step.finish(np.array(ids, np.uint64), _REASONS[reason or FinishedBy.ABORT])

    def _admit(self, step: StepDraft, budget: int) -> None:
        queues = self._queues
        room = self._max_running - len(queues.running)
        if budget <= 0 or room <= 0:
            return
        step.max_admissions, step.token_budget = room, budget
        for sequence in queues.waiting[:_ASKED_AT_ONCE]:
            if sequence.sequence_id:
                if sequence.reported < sequence.known:
                    self._observe(step, sequence)
                step.readmit(sequence.sequence_id, self._max_batch_tokens)
            elif queues.free_rows > 0:
                request = sequence.group.request
                sequence_id = step.admit(
                    sequence.tokens[: sequence.known].astype(np.uint32),
                    namespace_id=request.namespace_id,
                    read_cache=request.read_cache,
                    write_cache=request.write_cache,
                    max_chunk_tokens=self._max_batch_tokens,
                    priority=request.priority,
                    arrival_rank=sequence.group.request_id,
                    name=request.name,
                )
                queues.introduced(sequence, sequence_id, Phase.WAITING)
                sequence.reported = sequence.known

    @staticmethod
    def _observe(step: StepDraft, sequence: Sequence) -> None:
        tokens = sequence.tokens[sequence.reported : sequence.known].astype(np.uint32)
        step.observe(sequence.sequence_id, tokens)
        sequence.reported = sequence.known
