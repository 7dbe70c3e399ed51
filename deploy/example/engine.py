"""An example engine: the smallest thing that generates on kvplane, and proves what it gets.

Its "model" is a table of random queries, keys and values by token and layer, so that every attention output can be
computed a second way, without a cache: an output that differs ends the program. Prompts share a long beginning, as
system prompts do; from the second on, that part is hit and not computed again. With memory for fewer sequences than
there are prompts, some wait and some have to yield: both are normal, and the engine asks again.

    python engine.py --mode attached                                   beside the compute service (pid, ipc shared)
    python engine.py --mode remote --address localhost:50051           anywhere, over TCP
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import torch
from torch import Tensor

from kvplane.client import Session, StepDraft, StepResult
from kvplane.client.compute import Compute, open_compute
from kvplane.client.sequences import row_of
from kvplane.wire.addresses import cache_address, socket_path
from kvplane.wire.errors import KvplaneError, NotFoundError, UnavailableError

VOCABULARY = 1000
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
RETRY_SECONDS = 0.5


class Model:
    """Rows by token and layer. Queries have as many heads as keys."""

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        rows = torch.randn(3, num_layers, VOCABULARY, num_heads, head_dim, generator=torch.Generator().manual_seed(0))
        self._rows = rows.to(dtype)

    def rows(self, tokens: list[int], layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [tokens, heads, head_dim]."""
        query, key, value = self._rows[:, layer, torch.tensor(tokens)]
        return query, key, value

    def attention(self, tokens: list[int], start: int, layer: int) -> Tensor:
        """What attention over the whole sequence gives for the tokens from `start` on, float32."""
        query, key, value = (each.float().transpose(0, 1) for each in self.rows(tokens, layer))
        seen = torch.ones(len(tokens) - start, len(tokens), dtype=torch.bool).tril(start)
        out = torch.nn.functional.scaled_dot_product_attention(query[:, start:], key, value, attn_mask=seen)
        return out.transpose(0, 1)


@dataclass
class Request:
    """A prompt and what was generated behind it."""

    prompt: list[int]
    num_tokens: int
    sequence_id: int = 0
    tokens: list[int] = field(default_factory=list)
    written: int = 0
    """Tokens whose keys and values are in the pool."""
    running: bool = False
    hit_tokens: int = 0


@dataclass
class Totals:
    """What a run came to."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    checked: int = 0
    """Outputs compared, one per token and layer."""


class Engine:
    """A scheduler of one loop: admit what can be, compute what is new, take one more token each."""

    def __init__(self, session: Session, compute: Compute, model: Model, totals: Totals) -> None:
        self._session = session
        self._compute = compute
        self._model = model
        self._totals = totals
        self._requests: dict[int, Request] = {}

    def generate(self, requests: list[Request]) -> None:
        """Run requests to their end. Raises `AssertionError` for a wrong output."""
        draft = self._session.draft()
        for request in requests:
            request.sequence_id = draft.admit(request.prompt)
            request.tokens = list(request.prompt)
            self._requests[request.sequence_id] = request
            self._totals.prompt_tokens += len(request.prompt)
        self._note(self._session.run(draft))
        while self._requests:
            self._forward([each for each in self._requests.values() if each.running])
            self._note(self._session.run(self._next()))

    def _forward(self, batch: list[Request]) -> None:
        """Keys and values of all new tokens, and attention for them, layer by layer."""
        slots = self._session.sequences.num_slots
        batch = [each for each in batch if each.written < len(each.tokens) <= slots[row_of(each.sequence_id)]]
        if not batch:
            return
        new = [each.tokens[each.written :] for each in batch]
        plan = self._compute.plan(
            [each.sequence_id for each in batch],
            [len(tokens) for tokens in new],
            [len(each.tokens) for each in batch],
            num_query_heads=self._compute.num_kv_heads,
        )
        with plan:
            for layer in range(self._compute.num_layers):
                rows = [self._model.rows(tokens, layer) for tokens in new]
                query, key, value = (torch.cat(part) for part in zip(*rows, strict=True))
                out = plan.run(layer, query, key, value)
                expected = torch.cat([self._model.attention(each.tokens, each.written, layer) for each in batch])
                error = (out.float() - expected).abs().max().item()
                assert error <= TOLERANCE[self._compute.dtype], f"layer {layer} is off by {error}"
                self._totals.checked += len(out)
        for each in batch:
            self._totals.computed_tokens += len(each.tokens) - each.written
            each.written = len(each.tokens)

    def _next(self) -> StepDraft:
        """One token more for each that runs, an end for those that have theirs, another try for the rest."""
        draft = self._session.draft()
        for each in list(self._requests.values()):
            if not each.running:
                draft.readmit(each.sequence_id)
            elif len(each.tokens) - len(each.prompt) >= each.num_tokens:
                draft.commit([each.sequence_id], [each.written])
                draft.finish([each.sequence_id])
                del self._requests[each.sequence_id]
            elif each.written < len(each.tokens):
                draft.extend([each.sequence_id], [len(each.tokens)])
            else:
                token = (each.tokens[-1] * 31 + len(each.tokens)) % VOCABULARY
                draft.advance([each.sequence_id], [token], [each.written], [len(each.tokens) + 1])
                each.tokens.append(token)
        return draft

    def _note(self, result: StepResult) -> None:
        for admission in result.admitted:
            request = self._requests[admission.sequence_id]
            request.running, request.written = True, admission.cached_tokens
            request.hit_tokens = max(request.hit_tokens, admission.cached_tokens)
            self._totals.hit_tokens += admission.cached_tokens
        for preemption in (*result.preemptions, *result.revocations):
            request = self._requests[preemption.sequence_id]
            request.running = False
            self._totals.preemptions += 1
        for cut in result.cuts:
            request = self._requests[cut.sequence_id]
            request.written = min(request.written, cut.num_slots)
            request.running = cut.num_slots > 0


def main() -> int:
    """Generate, check, report."""
    options = _options()
    credentials = _credentials(options)
    totals, begin = Totals(), time.monotonic()
    with _open(options, credentials) as session, open_compute(session, credentials=credentials) as compute:
        waited = time.monotonic() - begin
        model = Model(compute.num_layers, compute.num_kv_heads, compute.head_dim, compute.dtype)
        generator = torch.Generator().manual_seed(options.seed)

        def tokens(count: int) -> list[int]:
            found: list[int] = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
            return found

        shared = tokens(options.shared_tokens)
        for index in range(options.rounds):
            requests = [
                Request(shared + tokens(options.own_tokens), options.new_tokens) for _ in range(options.prompts)
            ]
            start = time.monotonic()
            Engine(session, compute, model, totals).generate(requests)
            session.flush()
            seconds = time.monotonic() - start
            hits = [each.hit_tokens for each in requests]
            print(f"round {index}: {options.prompts} sequences in {seconds:.2f} s, tokens hit {hits}", flush=True)
            time.sleep(options.pause)
        transport = compute.transport
    print(
        f"{options.mode} ({transport}), waited {waited:.1f} s; prompt tokens {totals.prompt_tokens}, hit "
        f"{totals.hit_tokens}, computed {totals.computed_tokens}, preemptions {totals.preemptions}, outputs checked "
        f"{totals.checked}: all right"
    )
    return 0


def _open(options: argparse.Namespace, credentials: grpc.ChannelCredentials | None) -> Session:
    """A session, once there is a pool. Raises what the service says after `--wait` seconds."""
    deadline = time.monotonic() + options.wait
    if socket_path(options.address or cache_address()) is not None:
        credentials = None  # TLS is for TCP
    while True:
        try:
            return Session.open(options.pool, mode=options.mode, address=options.address, credentials=credentials)
        except (NotFoundError, UnavailableError):
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


def _credentials(options: argparse.Namespace) -> grpc.ChannelCredentials | None:
    if options.tls_ca is None:
        return None
    pair = [each.read_bytes() if each else None for each in (options.tls_key, options.tls_certificate)]
    return grpc.ssl_channel_credentials(options.tls_ca.read_bytes(), *pair)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An example engine on kvplane.")
    parser.add_argument("--mode", choices=("attached", "remote"), default="attached")
    parser.add_argument("--address", help="cache service (default: $KVPLANE_ADDRESS)")
    parser.add_argument("--pool", default="default")
    parser.add_argument("--tls-ca", type=Path)
    parser.add_argument("--tls-certificate", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--wait", type=float, default=120.0, help="seconds until there has to be a pool")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="sequences side by side")
    parser.add_argument("--shared-tokens", type=int, default=128, help="beginning that all prompts share")
    parser.add_argument("--own-tokens", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=12, help="tokens to generate")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between rounds")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvplaneError as error:
        sys.exit(f"engine: {error.reason}: {error.message}")
