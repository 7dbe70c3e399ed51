"""A random engine on the SDK, compared with what the service itself holds: tables, tokens, lengths, states."""

import random
from typing import Any

import numpy as np

from kvplane.cache.core.sequences import Status
from kvplane.client import FinishReason, SequenceState, StepResult
from kvplane.client.sequences import row_of

BLOCK = 16


class Walk:
    """Drives a session with random, legal steps; several are sent before their answers are collected."""

    def __init__(self, session: Any, seed: int, vocabulary: int = 3) -> None:
        self.session = session
        self.random = random.Random(seed)
        self.vocabulary = vocabulary
        self.waiting: list[int] = []
        self.running: dict[int, list[int]] = {}
        """Sequence -> [known, committed, slots] as far as results told and steps were sent."""
        self.finished: list[int] = []
        self.rests: dict[int, int] = {}
        """Sequences whose slots are not known before the answer to a step: rolled back, or new children."""
        self.seen = dict.fromkeys(("hit", "preempted", "stalled", "forked", "skipped", "copied"), 0)

    def steps(self, count: int) -> None:
        """Random steps, up to three of them without an answer."""
        for _ in range(count):
            self.session.submit(self._draft())
            while self.session.state.unanswered > self.random.choice((0, 0, 1, 2)):
                self.note(self.session.collect())
        while self.session.state.unanswered:
            self.note(self.session.collect())

    def finish_all(self) -> None:
        """End every sequence and let go of everything."""
        draft = self.session.draft()
        ids = [*self.running, *self.waiting]
        if ids:
            draft.finish(ids, FinishReason.ABORT)
        self.note(self.session.run(draft))
        self.running.clear()
        self.waiting.clear()
        self.session.complete(self.session.state.last_step)
        self.session.run(self.session.draft())

    def note(self, result: StepResult) -> None:
        """Act on a result as an engine does."""
        for admission in result.admitted:
            self.seen["hit"] += admission.cached_tokens > 0
            self.waiting.remove(admission.sequence_id)
            known = int(self.session.sequences.known[row_of(admission.sequence_id)])
            self.running[admission.sequence_id] = [known, admission.cached_tokens, admission.num_slots]
        for change in result.changes:
            sequence_id = change.sequence_id
            if change.state == SequenceState.PREEMPTED and sequence_id in self.running:
                self.seen["preempted"] += 1
                del self.running[sequence_id]
                self.waiting.append(sequence_id)
            elif change.state == SequenceState.WAITING and sequence_id in self.running:
                del self.running[sequence_id]  # a child that could not be forked
                self.waiting.append(sequence_id)
            elif change.state == SequenceState.STALLED:
                self.seen["stalled"] += 1
        for victim in result.revocations:
            if victim.sequence_id in self.running:
                del self.running[victim.sequence_id]
                self.waiting.append(victim.sequence_id)
        self.seen["skipped"] += len(result.skipped)
        self.seen["copied"] += len(result.copies)
        self.session.state.copies_done([copy.op_id for copy in result.copies])
        self.session.complete(result.step_id)

    def _draft(self) -> Any:
        draft, rng = self.session.draft(), self.random
        table = self.session.sequences
        slots = table.num_slots
        busy: set[int] = set()
        for sequence_id, lengths in list(self.running.items()):
            if self.rests.get(sequence_id, 0) > self.session.state.last_step:
                continue
            row = row_of(sequence_id)
            covered = int(slots[row]) if table.ids[row] == sequence_id else lengths[2]
            action = rng.random()
            known, committed, _ = lengths
            if action < 0.4 and min(known, covered) >= committed and known < 200:
                # decode: what was known is written, one more is known
                draft.advance(sequence_id, rng.randrange(self.vocabulary), min(known, covered), known + 2)
                self.running[sequence_id] = [known + 1, min(known, covered), known + 2]
                busy.add(sequence_id)
            elif action < 0.55:
                more = [rng.randrange(self.vocabulary) for _ in range(rng.randint(1, 20))]
                draft.observe(sequence_id, more)
                draft.extend(sequence_id, known + len(more))
                lengths[0] = known + len(more)
            elif action < 0.65 and committed < min(known, covered):
                draft.commit(sequence_id, min(known, covered))
                lengths[1] = min(known, covered)
            elif action < 0.72 and known > committed > 0:
                length = rng.randint(committed, known)
                draft.rollback(sequence_id, length)
                lengths[0] = length
                self.rests[sequence_id] = self.session.state.last_sent_step + 1
                busy.add(sequence_id)
            elif action < 0.8:
                draft.finish(sequence_id)
                del self.running[sequence_id]
                self.finished.append(sequence_id)
            elif action < 0.85 and sequence_id not in busy and len(self.running) + len(self.waiting) < 12:
                (child,) = draft.fork(sequence_id)
                self.seen["forked"] += 1
                self.running[child] = [*lengths]
                self.rests[child] = self.session.state.last_sent_step + 1
        if rng.random() < 0.7 and len(self.running) + len(self.waiting) < 10:
            length = rng.randint(1, 90)
            tokens: Any = np.array([rng.randrange(self.vocabulary) for _ in range(length)], np.uint32)
            if rng.random() < 0.6:
                tokens[:] = np.arange(length) % self.vocabulary  # something to hit
            chunk = rng.choice((None, 8, 40))
            self.waiting.append(draft.admit(tokens, max_chunk_tokens=chunk, name=f"r{len(self.finished)}"))
        again = [each for each in self.waiting if table.ids[row_of(each)] == each and rng.random() < 0.8]
        if again:
            draft.readmit(again)
        return draft


def same_as_service(session: Any, core: Any) -> None:
    """The session's columns are what the service holds of it. Only between steps."""
    rows = core.state.rows
    first = core.state.sessions[session.session_id].first_row
    table = session.sequences
    for row in range(len(table.ids)):
        there = first + row
        assert int(table.ids[row]) == int(rows.ids[there])
        if not table.ids[row]:
            continue
        held = rows.table(there)
        assert int(table.known[row]) == int(rows.known[there])
        assert int(table.committed[row]) == int(rows.committed[there])
        assert table.blocks[row, : table.num_blocks[row]].tolist() == held.tolist()
        assert not table.blocks[row, table.num_blocks[row] :].any()
        generations = core.state.columns.generation[held].tolist()
        assert table.generations[row, : len(held)].tolist() == generations
        runs = table.state[row] in (SequenceState.RUNNING, SequenceState.STALLED)
        assert runs == (rows.status[there] == Status.RUNNING)
        tokens = rows.token_bytes(there) if runs else rows.record(there).tokens
        assert table.tokens_of(int(table.ids[row])).astype("<u4").tobytes() == tokens
