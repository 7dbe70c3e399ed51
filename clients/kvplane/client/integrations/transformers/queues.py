"""Sequences by where they are: waiting, running, over but still held by the cache service."""

from bisect import insort
from dataclasses import replace

from kvplane.client.integrations.transformers.requests import FinishedBy
from kvplane.client.integrations.transformers.sequence import Phase, Sequence
from kvplane.client.values import Cut, SequenceState, StepResult


class Queues:
    """What results of the cache service and sampled tokens do to sequences."""

    def __init__(self, max_sequences: int) -> None:
        self.waiting: list[Sequence] = []
        """Not running, in the order in which they are to be admitted."""
        self.running: list[Sequence] = []
        """In the order of their arrival."""
        self.ended: list[Sequence] = []
        """Over; the cache service has to be told."""
        self.forks: list[tuple[Sequence, list[Sequence]]] = []
        """(parent, children): sampled from the same logits, and to be split by the next step."""
        self.free_rows = max_sequences
        """Sequences that the session has room for."""
        self._by_id: dict[int, Sequence] = {}
        self._leaving: list[Sequence] = []

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute and nothing to tell."""
        return not (self.waiting or self.running or self.ended or self.forks or self._leaving)

    def wait(self, sequence: Sequence) -> None:
        """A sequence is to be admitted."""
        insort(self.waiting, sequence, key=_order)

    def introduced(self, sequence: Sequence, sequence_id: int, phase: Phase) -> None:
        """The cache service is told about a sequence."""
        sequence.sequence_id, sequence.row, sequence.phase = sequence_id, sequence_id & 0xFFFF_FFFF, phase
        self._by_id[sequence_id] = sequence
        self.free_rows -= 1

    def end(self, sequence: Sequence) -> None:
        """A sequence is over; one that the cache service does not know is gone with that."""
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
        if sequence.sequence_id:
            self.ended.append(sequence)

    def begin_again(self, sequence: Sequence) -> None:
        """Slots behind the computed ones were written and cannot be again: the cache service is told that the sequence
        is over, and about a new one with the same tokens, which hits what was published."""
        if sequence not in self.running:
            return
        self.running.remove(sequence)
        old = replace(sequence, text=None, finished_by=FinishedBy.ABORT)
        self._by_id[old.sequence_id] = old
        self.ended.append(old)
        sequence.yielded()
        sequence.phase, sequence.sequence_id, sequence.reported = Phase.QUEUED, 0, 0
        self.wait(sequence)

    def finish_sent(self) -> list[Sequence]:
        """The cache service is told which sequences are over; returns them."""
        told, self.ended = self.ended, []
        self._leaving += told
        return told

    def apply(self, result: StepResult) -> list[Sequence]:
        """Take a result in; returns the sequences that started to run."""
        started = []
        for sequence in self._leaving:
            del self._by_id[sequence.sequence_id]
            sequence.sequence_id = 0
            self.free_rows += 1
        self._leaving = []
        for cut in result.cuts:
            self._cut(cut)
        for victim in (*result.preemptions, *result.revocations):
            self._yield(victim.sequence_id)
        for admission in result.admitted:
            sequence = self._by_id[admission.sequence_id]
            sequence.computed = sequence.committed = admission.cached_tokens
            self._run(sequence)
            started.append(sequence)
        for change in result.changes:
            child = self._by_id.get(change.sequence_id)
            if child is not None and child.phase is Phase.FORKING:
                self._forked(child, change.state)
        return started

    def _run(self, sequence: Sequence) -> None:
        sequence.phase = Phase.RUNNING
        if sequence.finished_by is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            insort(self.running, sequence, key=_order)

    def _forked(self, sequence: Sequence, state: SequenceState) -> None:
        if state is SequenceState.RUNNING:
            self._run(sequence)
        else:
            sequence.yielded()
            if sequence.finished_by is None:
                self.wait(sequence)

    def _cut(self, cut: Cut) -> None:
        """A restart of the cache service cost a sequence the end of its table."""
        sequence = self._by_id.get(cut.sequence_id)
        if cut.num_slots == 0:
            self._yield(cut.sequence_id)
        elif sequence is not None:
            sequence.computed = min(sequence.computed, cut.num_slots)
            sequence.committed = min(sequence.committed, cut.num_slots)

    def _yield(self, sequence_id: int) -> None:
        sequence = self._by_id.get(sequence_id)
        if sequence is None or sequence.phase is Phase.WAITING:
            return
        sequence.yielded()
        sequence.group.preemptions += 1
        if sequence.finished_by is None:
            if sequence in self.running:
                self.running.remove(sequence)
            self.wait(sequence)


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
