"""One engine of a chaos run, in a process of its own: it writes rows of the oracle, attends, and compares.

    python -m _chaos_engine NAME MODE TRANSPORT TTL_SECONDS RUN_SEED LIFE_SEED

with `$KVPLANE_ADDRESS` set. Standard input takes `drain` (finish everything, start nothing), `freeze` (send empty steps
only), `resume` (from both), `hog N` (hold the pool for N seconds), `rest N` (send nothing but heartbeats), `forget`
(close the session and open another one) and `stop`; standard output is one JSON object a line. It ends by itself only
on `stop`, on the end of its input, or on an error that no engine has to expect.
"""

import json
import random
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from _chaos_oracle import NUM_LAYERS, NUM_QUERY_HEADS, Oracle, differs, parts
from _chaos_prompts import SUB_SALTS, prefixes
from _chaos_sequences import CHUNK_TOKENS, Running, Sequences

from kvplane.client import Session, StepResult
from kvplane.client.compute import Compute, open_compute
from kvplane.client.sequences import row_of
from kvplane.wire.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    KvplaneError,
    LaunchPausedError,
    LimitExceededError,
    NotFoundError,
    NotGrantedError,
    PoolLostError,
    PreconditionError,
    SessionExpiredError,
    StaleEpochError,
    StaleGenerationError,
    UnavailableError,
)

REPORT_SECONDS = 0.25
CALL_SECONDS = 2.0
AWAY = (UnavailableError, DeadlineExceededError)
"""The service does not answer now: ask again."""

OVER = (SessionExpiredError, StaleEpochError, PoolLostError, NotFoundError)
"""The session is gone: open another one."""


class Reopen(Exception):  # noqa: N818 - a turn of events, not a failure
    """The session cannot go on."""


class Engine:
    """Decodes random prompts for as long as it is let, over any number of sessions."""

    def __init__(self, name: str, mode: str, transport: str, ttl: float, run_seed: int, life_seed: int) -> None:
        self.name, self.mode, self.transport, self.ttl = name, mode, transport, ttl
        self.random = random.Random(life_seed)
        self.shared = prefixes(run_seed)
        self.oracle = Oracle()
        self.counts: Counter[str] = Counter(tokens=0)
        self.commands: SimpleQueue[str] = SimpleQueue()
        self.draining = self.frozen = self.stopping = self.forgetting = False
        self.hog_until = self.rest_until = 0.0
        self.sequences = Sequences(self.random, self.shared, {}, name, self.counts)
        self.session: Session
        self.compute: Compute | None = None
        self.held = 0
        self._said_at = 0.0

    # The loop

    def run(self) -> None:
        """Until told to stop."""
        while not self.stopping:
            if not self._open():
                continue
            try:
                while not self.stopping:
                    self._listen()
                    self._check_forgotten()
                    if time.monotonic() < self.rest_until:
                        time.sleep(0.05)
                    else:
                        self._iterate()
                    self._report()
                self._drain_session()
            except Reopen as reason:
                say("reopen", session=self.session.session_id, why=str(reason))
            finally:
                self._close()

    def _open(self) -> bool:
        self._listen()
        self._report()
        try:
            self.session = Session.open(
                mode=self.mode,  # type: ignore[arg-type] # one of the two
                ttl_seconds=self.ttl,
                max_sequences=64,
                engine_name=self.name,
                timeout=CALL_SECONDS,
            )
        except (*AWAY, *OVER, LimitExceededError, PreconditionError) as error:
            say("waits", why=repr(error))
            time.sleep(0.1)
            return False
        self.counts["sessions"] += 1
        try:
            namespaces = {
                name: self.session.register_namespace(sub_salt=salt) if name else 0 for name, salt in SUB_SALTS.items()
            }
        except KvplaneError as error:
            self._close()
            say("waits", why=repr(error))
            time.sleep(0.1)
            return False
        self.sequences = Sequences(self.random, self.shared, namespaces, self.name, self.counts)
        return True

    def _iterate(self) -> None:
        draft, sequences = self.session.draft(), self.sequences
        sequences.draining, sequences.hog_until = self.draining, self.hog_until
        if not self.frozen:
            sequences.write(draft)
        told = self.session.state.completed_step
        self.session.submit(draft)
        # As engines do it: compute while the step is on its way. Now and then after its answer, on newer tables.
        ahead = self.random.random() < 0.8
        if ahead and not self.frozen:
            self._forward()
        result = self._collect()
        self.counts["steps"] += 1
        sequences.take(result)
        self.held = max(self.held, self._blocks())
        if self.frozen:
            time.sleep(0.02)
            return
        if not ahead:
            self._forward()
        # Drained: everything is finished, and the service was told that nothing of it runs any more.
        if self.draining and not sequences.all and told >= result.step_id - 2:
            say("drained", session=self.session.session_id)
            time.sleep(0.1)
        elif not any(each.runs for each in sequences.all.values()):
            time.sleep(0.01)

    def _collect(self) -> StepResult:
        while True:
            try:
                return self.session.collect(CALL_SECONDS)
            except AWAY:
                self.counts["away"] += 1
                self._listen()
                self._report()
                self._check_forgotten()
                if self.stopping:
                    raise Reopen("stopped while the service was away") from None
            except OVER as error:
                raise Reopen(repr(error)) from None

    def _check_forgotten(self) -> None:
        if self.forgetting:
            self.forgetting = False
            raise Reopen("ToldTo()")

    # The forward pass

    def _forward(self) -> None:
        slots = self.session.sequences.num_slots
        batch = []
        for sequence_id, each in self.sequences.all.items():
            end = min(len(each.tokens), int(slots[row_of(sequence_id)]), each.written + CHUNK_TOKENS)
            if each.runs and end > each.written:
                batch.append((sequence_id, each, end))
        if not batch:
            return
        try:
            if self.compute is None:
                transport: Any = self.transport
                self.compute = open_compute(self.session, transport, timeout_seconds=CALL_SECONDS)
                self.counts["compute_opened"] += 1
            self._run(self.compute, batch)
        except LaunchPausedError:
            self.counts["paused"] += 1
            time.sleep(0.05)
        except StaleGenerationError as error:
            self.counts["stale"] += 1
            raise Reopen(repr(error)) from None
        except (*OVER, NotGrantedError, AlreadyExistsError) as error:
            raise Reopen(repr(error)) from None
        except AWAY as error:
            say("shard away", why=repr(error))
            # Attached: the mapping is over. Remote: the next plan opens its streams again, or says that it cannot.
            if self.mode == "attached" or self.compute is None:
                self._close_compute()
            else:
                for _, each, _ in batch:
                    each.broken = True
            time.sleep(0.05)

    def _run(self, compute: Compute, batch: list[tuple[int, Running, int]]) -> None:
        rows = [self.oracle.rows(each.namespace, each.tokens, 0, end) for _, each, end in batch]
        new = torch.cat([all_rows[each.written :] for all_rows, (_, each, _) in zip(rows, batch, strict=True)])
        plan = compute.plan(
            [sequence_id for sequence_id, _, _ in batch],
            [end - each.written for _, each, end in batch],
            [end for _, _, end in batch],
            num_query_heads=NUM_QUERY_HEADS,
        )
        with plan:
            outputs = [plan.run(layer, *parts(new[:, layer])) for layer in range(NUM_LAYERS)]
        for layer, out in enumerate(outputs):
            first = 0
            for all_rows, (sequence_id, each, end) in zip(rows, batch, strict=True):
                count = end - each.written
                expected = self.oracle.attention(all_rows, each.written, layer)
                wrong = differs(out[first : first + count], expected)
                first += count
                self.counts["outputs"] += count
                if wrong:
                    self._mismatch(sequence_id, each, end, layer, wrong)
        for _, each, end in batch:
            self.counts["tokens"] += end - each.written
            each.written, each.moved_at = end, time.monotonic()

    def _mismatch(self, sequence_id: int, each: Running, end: int, layer: int, wrong: list[int]) -> None:
        self.counts["mismatches"] += 1
        row = row_of(sequence_id)
        table = self.session.sequences
        held = int(table.num_blocks[row])
        say(
            "mismatch",
            session=self.session.session_id,
            sequence=sequence_id,
            layer=layer,
            positions=[each.written + at for at in wrong],
            end=end,
            hit=each.hit,
            committed=each.committed,
            blocks=table.blocks[row, :held].tolist(),
            generations=[f"{mark:#x}" for mark in table.generations[row, :held].tolist()],
        )

    # Around it

    def _blocks(self) -> int:
        table = self.session.sequences
        named = int(np.count_nonzero(table.blocks[table.rows_in_use]))
        work = self.session.state.work
        return named + sum(len(each.ids) for each in work.deferred_behind(work.completed_step))

    def _listen(self) -> None:
        with suppress(Empty):
            while True:
                word, *rest = self.commands.get_nowait().split() or [""]
                if word == "stop":
                    self.stopping = True
                elif word in ("drain", "freeze", "resume"):
                    self.draining, self.frozen = word == "drain", word == "freeze"
                    if self.frozen:
                        say("frozen")
                elif word == "forget":
                    self.forgetting = True
                elif word == "hog":
                    self.hog_until = time.monotonic() + float(rest[0])
                elif word == "rest":
                    self.rest_until = time.monotonic() + float(rest[0])

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._said_at < REPORT_SECONDS:
            return
        self._said_at = now
        oldest = min(self.sequences.all.items(), key=lambda pair: pair[1].moved_at, default=None)
        stuck = {}
        if oldest is not None:
            sequence_id, each = oldest
            stuck = {
                "moved_at": each.moved_at,
                "oldest": f"{sequence_id:#x} {'runs' if each.runs else 'forks' if each.forking else 'waits'} "
                f"{each.written}/{len(each.tokens)}",
            }
        session = getattr(self, "session", None)
        say("progress", session=session.session_id if session else 0, held=self.held, counts=self.counts, **stuck)
        self.held = self._blocks() if session and not session.state.closed else 0

    def _drain_session(self) -> None:
        if self.sequences.all:
            draft = self.session.draft()
            draft.finish(list(self.sequences.all))
            self.session.submit(draft)
            self._collect()

    def _close_compute(self) -> None:
        compute, self.compute = self.compute, None
        if compute is not None:
            with suppress(KvplaneError):
                compute.close()

    def _close(self) -> None:
        self._close_compute()
        with suppress(KvplaneError):
            self.session.close()


def say(kind: str, **values: Any) -> None:
    """One line for the one who runs this."""
    print(json.dumps({"kind": kind, "at": time.monotonic(), **values}), flush=True)


def main() -> None:
    """See the module."""
    name, mode, transport, ttl, run_seed, life_seed = sys.argv[1:]
    torch.set_num_threads(1)
    engine = Engine(name, mode, transport, float(ttl), int(run_seed), int(life_seed))

    def listen() -> None:
        for line in sys.stdin:
            engine.commands.put(line)
        engine.commands.put("stop")

    threading.Thread(target=listen, daemon=True).start()
    say("started")
    try:
        engine.run()
    except KvplaneError as error:
        traceback.print_exc()
        say("failed", why=repr(error))
        sys.exit(1)
    say("stopped", counts=engine.counts)


if __name__ == "__main__":
    main()
