"""Sequences of a chaos engine: what it asks for in a step, and what an answer means for them."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from _chaos_prompts import VOCABULARY, draw

from kvplane.client import FinishReason, SequenceState, StepDraft, StepResult

MAX_RUNNING, MAX_WAITING, CHUNK_TOKENS = 6, 2, 24


@dataclass(eq=False)
class Running:
    """A sequence."""

    namespace: str
    tokens: list[int]
    limit: int
    """Tokens at which it ends."""
    reported: int
    written: int = 0
    committed: int = 0
    runs: bool = False
    forking: bool = False
    broken: bool = False
    """A pass that failed may have written slots, and a shard takes no second write: it begins again under a new id."""
    hit: int = 0
    moved_at: float = field(default_factory=time.monotonic)


class Sequences:
    """All of one session."""

    def __init__(
        self, rng: random.Random, shared: list[list[int]], namespaces: dict[str, int], name: str, counts: Counter[str]
    ) -> None:
        self.random, self.shared, self.namespaces, self.name, self.counts = rng, shared, namespaces, name, counts
        self.all: dict[int, Running] = {}
        self.draining = False
        self.hog_until = 0.0

    def write(self, draft: StepDraft) -> None:
        """What is written and sampled, what ends, what begins, and slots for what comes next."""
        hogging = time.monotonic() < self.hog_until
        for sequence_id, each in list(self.all.items()):
            if each.forking:
                continue
            if each.broken and not self.draining:
                self._begin_again(draft, sequence_id, each)
            elif self.draining or (each.runs and each.written >= each.limit and not hogging):
                self._report_tokens(draft, sequence_id, each)
                draft.finish(sequence_id)
                del self.all[sequence_id]
                self.counts["finished"] += 1
            elif not each.runs:
                self._report_tokens(draft, sequence_id, each)
                draft.readmit(sequence_id, CHUNK_TOKENS)
            elif each.written == len(each.tokens) and len(each.tokens) < each.limit:
                each.tokens.append(self.random.randrange(VOCABULARY))
                # A slot more than is known: the next token is computed while the next step is on its way.
                draft.advance(sequence_id, each.tokens[-1], each.written, len(each.tokens) + 1)
                each.reported, each.committed = len(each.tokens), each.written
            else:
                self._report_tokens(draft, sequence_id, each)
                draft.extend(sequence_id, max(each.written, min(len(each.tokens), each.written + CHUNK_TOKENS)))
                if self.random.random() < 0.05 and each.written and len(self.all) < MAX_RUNNING:
                    self._fork(draft, sequence_id, each)
        if self.draining:
            return
        running = sum(each.runs for each in self.all.values())
        most = 3 * MAX_RUNNING if hogging else MAX_RUNNING
        if running < most and len(self.all) - running < MAX_WAITING:
            namespace, tokens = draw(self.random, self.shared)
            sequence_id = draft.admit(
                tokens, namespace_id=self.namespaces[namespace], max_chunk_tokens=CHUNK_TOKENS, name=self.name
            )
            limit = len(tokens) + (120 if hogging else self.random.randint(2, 30))
            self.all[sequence_id] = Running(namespace, tokens, limit, len(tokens))

    def _begin_again(self, draft: StepDraft, sequence_id: int, each: Running) -> None:
        draft.finish(sequence_id, FinishReason.ABORT)
        del self.all[sequence_id]
        again = draft.admit(
            each.tokens,
            namespace_id=self.namespaces[each.namespace],
            max_chunk_tokens=CHUNK_TOKENS,
            name=self.name,
        )
        self.all[again] = Running(each.namespace, each.tokens, each.limit, len(each.tokens))
        self.counts["begun_again"] += 1

    def _report_tokens(self, draft: StepDraft, sequence_id: int, each: Running) -> None:
        if each.reported < len(each.tokens):
            draft.observe(sequence_id, each.tokens[each.reported :])
            each.reported = len(each.tokens)
        if each.runs and each.committed < each.written:
            draft.commit(sequence_id, each.written)
            each.committed = each.written

    def _fork(self, draft: StepDraft, sequence_id: int, each: Running) -> None:
        (child,) = draft.fork(sequence_id)
        self.counts["forks"] += 1
        # A child continues its parent's tokens; its own come later.
        self.all[child] = Running(
            each.namespace, each.tokens[:], each.limit, each.reported, each.written, each.committed, forking=True
        )

    def take(self, result: StepResult) -> None:
        """What an answer changes."""
        now = time.monotonic()
        for cut in result.cuts:
            self.counts["cuts"] += 1
            each = self.all.get(cut.sequence_id)
            if each is not None and cut.num_slots:
                each.written, each.committed = min(each.written, cut.num_slots), min(each.committed, cut.num_slots)
            elif each is not None:
                self._yielded(each)
        for victim in (*result.preemptions, *result.revocations):
            each = self.all.get(victim.sequence_id)
            if each is not None and (each.runs or each.forking):
                self.counts["preempted"] += 1
                self._yielded(each)
        for admission in result.admitted:
            each = self.all[admission.sequence_id]
            each.runs, each.forking, each.moved_at = True, False, now
            each.written = each.committed = each.hit = admission.cached_tokens
            self.counts["hit_tokens"] += admission.cached_tokens
        for change in result.changes:
            each = self.all.get(change.sequence_id)
            if each is not None and each.forking:
                each.forking, each.runs = False, change.state == SequenceState.RUNNING
                if not each.runs:
                    self._yielded(each)

    @staticmethod
    def _yielded(each: Running) -> None:
        each.runs = each.forking = False
        each.written = each.committed = 0
