"""An engine on the SDK with compute access: it feeds keys and values of the oracle and checks every output it gets."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from compute_engine import running, settings
from compute_oracle import Oracle, assert_attention
from kvplane.client import Session, StepResult
from kvplane.client.compute import Compute, Transport, open_compute
from kvplane.compute.server import ComputeServer
from service_rig import RunningService, wait_until

BLOCK = 4
MODES: dict[str, tuple[Literal["attached", "remote"], Transport]] = {
    "attached": ("attached", "auto"),
    "remote shm": ("remote", "shm"),
    "remote inline": ("remote", "inline"),
}


@dataclass(eq=False)
class Rig:
    """A cache service with one pool over some shards."""

    service: RunningService
    servers: list[ComputeServer]
    oracle: Oracle
    window: int | None = None
    engines: list["Engine"] = field(default_factory=list)

    def engine(self, mode: str = "attached", **options: Any) -> "Engine":
        """An engine on a session of its own."""
        kind, transport = MODES[mode]
        session = Session.open(mode=kind, address=self.service.address, max_sequences=64, **options)
        made = Engine(session, open_compute(session, transport), self.oracle, self.window)
        self.engines.append(made)
        return made

    def stats(self) -> tuple[int, int]:
        """Held and quarantined blocks."""
        pool = self.service.server.plane.pools["default"]
        found = self.service.on_loop(pool.stats)
        return found.held_blocks, found.quarantined_blocks

    def close(self) -> None:
        """Close what is open; every block must come back, and the invariants hold."""
        self.service.check_integrity()
        for engine in self.engines:
            engine.close()
        wait_until(lambda: self.stats() == (0, 0), "every block is back")
        self.service.check_integrity()


@contextmanager
def rig(
    folder: Path, shards: int = 1, oracle: Oracle | None = None, change: Callable[[int], dict[str, Any]] = lambda _: {}
) -> Iterator[Rig]:
    """Services on Unix sockets; `change` gives further settings of a shard by rank."""
    oracle = oracle or Oracle(4, 2, 8, 16, torch.float32)
    with ExitStack() as stack:
        service = RunningService(folder, watermark=0.0)
        stack.callback(service.stop)
        model = {
            "num_layers": oracle.num_layers,
            "num_kv_heads": oracle.num_kv_heads,
            "head_dim": oracle.head_dim,
            "kv_dtype": str(oracle.dtype).removeprefix("torch."),
            "block_tokens": BLOCK,
            "tokenizer_revision": "t",
        }
        values = [settings(folder, f"compute-{rank}", rank=rank, **(model | change(rank))) for rank in range(shards)]
        servers = [stack.enter_context(running(each)) for each in values]
        service.wait_ready()
        made = Rig(service, servers, oracle, values[0].get("window_tokens"))
        try:
            yield made
        except BaseException:
            for engine in made.engines:
                engine.close()
            raise
        made.close()


class Engine:
    """Tokens and lengths of some sequences, as an engine keeps them."""

    def __init__(self, session: Session, compute: Compute, oracle: Oracle, window: int | None) -> None:
        self.session = session
        self.compute = compute
        self.oracle = oracle
        self.window = window
        self.tokens: dict[int, list[int]] = {}
        self.written: dict[int, int] = {}

    def admit(self, prompt: Sequence[int], **options: Any) -> int:
        """Admit a prompt; returns its id. What was hit counts as written."""
        draft = self.session.draft()
        sequence_id = draft.admit(list(prompt), **options)
        result = self.session.run(draft)
        (admission,) = result.admitted
        self.tokens[sequence_id] = list(prompt)
        self.written[sequence_id] = admission.cached_tokens
        return sequence_id

    def forward(self, *sequence_ids: int, ends: dict[int, int] | None = None) -> None:
        """One plan over all layers: what is known and not written (or up to `ends`), every output checked."""
        spans = [(each, self.written[each], (ends or {}).get(each, len(self.tokens[each]))) for each in sequence_ids]
        plan = self.compute.plan(
            [each for each, _, _ in spans],
            [end - start for _, start, end in spans],
            [end for _, _, end in spans],
            num_query_heads=self.oracle.num_query_heads,
        )
        with plan:
            for layer in range(self.oracle.num_layers):
                rows = [self.oracle.rows(self.tokens[each], start, end, layer) for each, start, end in spans]
                query, key, value = (torch.cat([each[part] for each in rows]) for part in range(3))
                out = plan.run(layer, query, key, value)
                expected = [
                    self.oracle.attention(self.tokens[each], start, end, layer, self.window)
                    for each, start, end in spans
                ]
                assert_attention(out, torch.cat(expected))
        for each, _, end in spans:
            self.written[each] = end

    def grow(self, sequence_id: int, num_slots: int) -> StepResult:
        """Commit what is written and ask for slots."""
        draft = self.session.draft()
        draft.commit([sequence_id], [self.written[sequence_id]])
        draft.extend([sequence_id], [num_slots])
        return self.session.run(draft)

    def advance(self, sampled: dict[int, int]) -> StepResult:
        """One more token for each sequence, with a slot to write it to."""
        draft = self.session.draft()
        lengths = [len(self.tokens[each]) for each in sampled]
        draft.advance(list(sampled), list(sampled.values()), lengths, [length + 1 for length in lengths])
        for sequence_id, token in sampled.items():
            self.tokens[sequence_id].append(token)
        return self.session.run(draft)

    def fork(self, parent: int, count: int) -> list[int]:
        """Children at what the parent has written."""
        draft = self.session.draft()
        draft.commit([parent], [self.written[parent]])
        children = draft.fork(parent, count)
        self.session.run(draft)
        for child in children:
            self.tokens[child] = self.tokens[parent][:]
            self.written[child] = self.written[parent]
        return children

    def finish(self, *sequence_ids: int) -> StepResult:
        """End sequences."""
        draft = self.session.draft()
        draft.finish(list(sequence_ids))
        result = self.session.run(draft)
        for each in sequence_ids:
            del self.tokens[each], self.written[each]
        return result

    def close(self) -> None:
        self.compute.close()
        self.session.close()
