"""Continuous batching for a transformers model whose KV cache is a pool of kvplane."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import grpc
import torch

from kvplane.client.compute import Compute, open_compute
from kvplane.client.integrations.transformers.completions import Completions
from kvplane.client.integrations.transformers.forward import ForwardPass
from kvplane.client.integrations.transformers.model import LoadedModel, load_model
from kvplane.client.integrations.transformers.opening import open_session
from kvplane.client.integrations.transformers.queues import Queues
from kvplane.client.integrations.transformers.requests import Event, Output, Request, SamplingParams
from kvplane.client.integrations.transformers.scheduler import Scheduler
from kvplane.client.session import Session
from kvplane.client.values import StepResult
from kvplane.wire.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    KvplaneError,
    LaunchPausedError,
    NotFoundError,
    PreconditionError,
    StaleEpochError,
    UnavailableError,
)

Prompt = str | Sequence[int]

_WAIT_SECONDS = 0.001
_LONGEST_WAIT_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where one iteration's time went."""

    total_seconds: float
    exposed_seconds: float
    """What the control plane cost the engine: writing and sending the step, receiving and applying its result."""
    tokens: int
    """Tokens that were computed; 0 when there was nothing to compute."""


class Engine:
    """Serves requests to one model on one pool. Use it from one thread, as a context manager.

    `generate` answers prompts; `stream` tells tokens as they come; `add`, `step` and `abort` put it under a server's
    own loop. Tokens are those of plain transformers, whatever is batched, cached or preempted.
    """

    def __init__(
        self,
        model: LoadedModel,
        session: Session,
        compute: Compute,
        *,
        max_batch_tokens: int = 512,
        max_running: int = 256,
    ) -> None:
        """On a session and a compute access that are open; they stay the caller's. See `open`."""
        if max_running < 1 or max_batch_tokens < max_running:
            raise InvalidArgumentError.of(
                "max_batch_tokens",
                f"must be at least max_running, and that at least 1: {max_batch_tokens}, {max_running}",
            )
        self.model = model
        self.session = session
        self.compute = compute
        self.outage_seconds = 60.0
        """How long a cache service that is away is waited for."""
        self.timings: deque[StepTiming] = deque(maxlen=4096)
        """Of the newest iterations."""
        pool_tokens = (session.pool.num_blocks - 1) * session.block_tokens
        max_sequences = len(session.sequences.ids)
        self._queues = Queues(max_sequences)
        self._scheduler = Scheduler(session.sequences, self._queues, max_batch_tokens, max_running)
        self._completions = Completions(model, self._queues, min(model.max_length, pool_tokens))
        self._forward = ForwardPass(model, compute)
        self._wait_seconds = 0.0
        self._releasing_step = 0
        """Newest step that let go of blocks; they are free once a later one says that it completed."""
        self._told_completed = 0
        self._broken: KvplaneError | None = None
        self._resources = ExitStack()

    @classmethod
    def open(
        cls,
        model: str | Path | LoadedModel | None = None,
        pool: str = "default",
        *,
        mode: Literal["attached", "remote"] = "attached",
        address: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        credentials: grpc.ChannelCredentials | None = None,
        transport: Literal["auto", "shm", "inline"] = "auto",
        ttl_seconds: float = 10.0,
        max_batch_tokens: int = 512,
        max_running: int = 256,
        max_sequences: int = 1024,
        wait_seconds: float = 0.0,
        name: str | None = None,
    ) -> Self:
        """Load a model and open a session on a pool that was made for it.

        `model`: a local folder, a loaded model, or None for SmolLM2-135M-Instruct. `address` is the cache service's
        (default: `$KVPLANE_ADDRESS`, or the socket in the runtime directory). `max_batch_tokens` are computed in one
        forward pass at most; `max_running` sequences run at the same time at most. `wait_seconds`: how long to wait for
        a pool that is not there yet. Raises `IdentityMismatchError` when the pool holds another model's cache, and what
        `load_model`, `Session.open` and `open_compute` raise.
        """
        loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype)
        with ExitStack() as resources:
            session = resources.enter_context(
                open_session(
                    pool, mode, address, credentials, ttl_seconds, max_sequences, name or "transformers", wait_seconds
                )
            )
            loaded.check_pool(session.pool)
            compute = resources.enter_context(open_compute(session, transport=transport))
            torch.nn.Module.to(loaded.module, compute.device)
            engine = cls(loaded, session, compute, max_batch_tokens=max_batch_tokens, max_running=max_running)
            engine._resources = resources.pop_all()
        return engine

    # Whole prompts

    def generate(
        self, prompts: Iterable[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Answer prompts (texts or token ids); outputs in their order. `sampling` for all, or one for each.

        Other requests go on meanwhile; their events are dropped, so use `stream` or `step` for them.
        """
        asked = list(prompts)
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(asked)
        if len(each) != len(asked):
            raise InvalidArgumentError.of("sampling", f"{len(each)} given for {len(asked)} prompts")
        ids: list[int] = []
        outputs: dict[int, Output] = {}
        try:
            for prompt, params in zip(asked, each, strict=True):
                ids.append(self.add(Request(prompt, params)))
            while any(request_id not in outputs for request_id in ids):
                outputs.update({event.request_id: event.output for event in self.step() if event.output is not None})
        except BaseException:
            for request_id in ids:
                self._give_up(request_id)
            raise
        self.settle()
        return [outputs[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Event]:
        """Events of one request as they come. Leaving the iteration early aborts it, and lets go of its blocks."""
        request_id = self.add(Request(prompt, sampling or SamplingParams()))
        finished = False
        try:
            while not finished:
                for event in self.step():
                    if event.request_id == request_id:
                        finished = finished or event.output is not None
                        yield event
        except GeneratorExit:
            self._give_up(request_id)
            with suppress(KvplaneError):  # an error has no way out of here; the next step meets it again
                self.settle()
            raise
        except BaseException:
            self._give_up(request_id)
            raise
        self.settle()

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for its answer."""
        if self.model.tokenizer is None:
            raise InvalidArgumentError.of("messages", "are text, and the model has no tokenizer")
        encoded: Any = self.model.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        ids: list[int] = encoded["input_ids"]
        return ids

    # Step by step

    def add(self, request: Request | Prompt) -> int:
        """Queue a request; returns its id. Raises `InvalidArgumentError` and changes nothing."""
        self._check_usable()
        return self._completions.add(request if isinstance(request, Request) else Request(request))

    def abort(self, request_id: int) -> list[Event]:
        """End a request now; returns its last events. Raises `NotFoundError` when it is over already."""
        self._check_usable()
        return self._completions.abort(request_id)

    @property
    def unfinished(self) -> int:
        """Requests without an output."""
        return len(self._completions)

    def step(self) -> list[Event]:
        """One iteration: a step of the cache service, and a forward pass while that is answered.

        Returns what it brought, in the order of the batch; nothing when there is nothing to do. An error of the forward
        pass (a lease that was not renewed, a shard that is gone) leaves the requests as they were before it.
        """
        self._check_usable()
        while self.session.state.unanswered:
            self._collect()  # an interrupt left it
        if self._idle:
            return []
        start = time.perf_counter()
        draft = self.session.draft()
        batch = self._scheduler.plan(draft)
        self._told_completed = self.session.state.completed_step
        if draft.finished:
            self._releasing_step = self.session.state.last_sent_step + 1
        try:
            self.session.submit(draft)
        except KvplaneError as error:
            self._broken = error
            raise
        sent = time.perf_counter()
        events: list[Event] = []
        failed = batch
        try:
            if batch is not None:
                sequences, places = self._completions.targets(batch)
                tokens = self._forward.run(batch, places, [each.sampler for each in sequences])
                failed = None
                events = self._completions.take(sequences, tokens)
            elif self.session.state.work.open_plans:
                self._forward.drain()
        except (LaunchPausedError, StaleEpochError):
            # The cache service is away, or was started anew: nothing counts as computed, and the result of this step
            # says with what to go on.
            batch = None
        finally:
            computed = time.perf_counter()
            self._collect()
            if failed is not None and self._forward.written:
                for sequence in failed.sequences:
                    self._queues.begin_again(sequence)
        end = time.perf_counter()
        self.timings.append(StepTiming(end - start, sent - start + end - computed, len(batch.tokens) if batch else 0))
        if batch is None:
            self._back_off()
        return events

    def run(self) -> list[Output]:
        """Step until every request is finished; returns their outputs in the order in which they ended."""
        outputs = [event.output for event in self._events() if event.output is not None]
        self.settle()
        return outputs

    def settle(self) -> None:
        """With no request left, tell the cache service so until nothing of this engine is held or deferred. Cached
        prefixes stay. Does nothing while requests are unfinished."""
        while not self.unfinished and not self._idle:
            self.step()

    def close(self) -> None:
        """End the compute access and the session that `open` made. What was cached stays for others."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _idle(self) -> bool:
        return self._queues.empty and self._told_completed >= self._releasing_step

    def _events(self) -> Iterator[Event]:
        while self.unfinished:
            yield from self.step()

    def _collect(self) -> None:
        try:
            result = self._result()
        except KvplaneError as error:
            # What the service and this engine believe about the sequences differs from now on.
            self._broken = error
            raise
        started = self._queues.apply(result)
        self._completions.started(result.admitted, started)
        if started or result.changes:
            self._wait_seconds = 0.0

    def _result(self) -> StepResult:
        """The answer to the step, also when the cache service is away for a while: the session says so in its log, and
        goes on where it was."""
        deadline = time.monotonic() + self.outage_seconds
        while True:
            try:
                return self.session.collect()
            except (UnavailableError, DeadlineExceededError):
                if time.monotonic() > deadline:
                    raise

    def _back_off(self) -> None:
        """Nothing could be computed: all that is left waits for blocks, or for a prefix that is being published."""
        if self._wait_seconds and self.unfinished:
            time.sleep(self._wait_seconds)
        self._wait_seconds = min(max(_WAIT_SECONDS, 2 * self._wait_seconds), _LONGEST_WAIT_SECONDS)

    def _give_up(self, request_id: int) -> None:
        """Abort a request whose caller has left, if it is not over; the engine may have ended as well."""
        with suppress(NotFoundError, PreconditionError):
            self.abort(request_id)

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise PreconditionError(
                f"the engine ended with {self._broken.reason}: {self._broken.message}; open another one",
                reason=self._broken.reason,
            ) from self._broken
