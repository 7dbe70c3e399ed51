"""Requests as they begin, grow token by token, and end."""

import time
from collections.abc import Sequence as Ids
from typing import Any

import numpy as np

from kvplane.client.integrations.transformers.batch import Batch
from kvplane.client.integrations.transformers.model import LoadedModel
from kvplane.client.integrations.transformers.queues import Queues
from kvplane.client.integrations.transformers.requests import Event, FinishedBy, Request
from kvplane.client.integrations.transformers.sampling import Sampler
from kvplane.client.integrations.transformers.sequence import RequestGroup, Sequence
from kvplane.client.integrations.transformers.streaming import TextStream
from kvplane.client.values import Admission
from kvplane.wire.errors import InvalidArgumentError, NotFoundError


class Completions:
    """The requests of an engine that are not finished."""

    def __init__(self, model: LoadedModel, queues: Queues, max_length: int) -> None:
        self._model = model
        self._queues = queues
        self._max_length = max_length
        self._groups: dict[int, RequestGroup] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, request: Request) -> int:
        """Check and queue a request; returns its id. Raises `InvalidArgumentError`."""
        prompt = self._prompt(request.prompt)
        params = request.sampling
        if len(prompt) >= self._max_length:
            raise InvalidArgumentError.of(
                "prompt", f"has {len(prompt)} tokens; model and pool have room for {self._max_length}, one new included"
            )
        if params.stop_strings and self._model.tokenizer is None:
            raise InvalidArgumentError.of("sampling.stop_strings", "need a tokenizer, and the model has none")
        self._last_id += 1
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._model.eos_token_ids)
        group = RequestGroup(self._last_id, request, len(prompt), ends)
        tokens = np.zeros(min(len(prompt) + params.max_new_tokens, self._max_length), np.int64)
        tokens[: len(prompt)] = prompt
        for index in range(params.n):
            text = TextStream(self._model.tokenizer, params.stop_strings) if self._model.tokenizer is not None else None
            own = tokens if index == 0 else tokens.copy()
            group.sequences.append(Sequence(group, index, Sampler(params, index), own, len(prompt), text=text))
        self._groups[group.request_id] = group
        self._queues.wait(group.sequences[0])
        return group.request_id

    def abort(self, request_id: int) -> list[Event]:
        """End a request; its completions are what came until now. Raises `NotFoundError` for one that is over."""
        group = self._groups.get(request_id)
        if group is None:
            raise NotFoundError(
                f"request {request_id} is finished or was never added", metadata={"request": str(request_id)}
            )
        events = [self._end(each, (), "", FinishedBy.ABORT) for each in group.sequences if each.finished_by is None]
        self._queues.forks = [fork for fork in self._queues.forks if fork[0].group is not group]
        return events

    def started(self, admissions: Ids[Admission], sequences: Ids[Sequence]) -> None:
        """Sequences were admitted: for the metrics of their requests."""
        now = time.perf_counter()
        for admission, sequence in zip(admissions, sequences, strict=True):
            group = sequence.group
            if group.admitted is None:
                group.admitted = now
                group.cached_tokens, group.hit_reason = admission.cached_tokens, admission.hit_reason

    def targets(self, batch: Batch) -> tuple[list[Sequence], list[int]]:
        """Sequences to sample for, and for each its place among the batch's sampled rows: all completions of a request
        draw their first token from the same row."""
        sequences: list[Sequence] = []
        places: list[int] = []
        for place, sequence in enumerate(batch.sampling):
            group = sequence.group
            first = group.sequences if group.first_token is None else (sequence,)
            sequences += [each for each in first if each.finished_by is None]
            places += [place] * (len(sequences) - len(places))
        return sequences, places

    def take(self, sequences: Ids[Sequence], tokens: Ids[int]) -> list[Event]:
        """Append sampled tokens, and see what that ends. Splits requests whose prompt was just computed."""
        now = time.perf_counter()
        events, split = [], dict[int, RequestGroup]()
        for sequence, token in zip(sequences, tokens, strict=True):
            group = sequence.group
            if group.first_token is None:
                group.first_token = now
                if len(group.sequences) > 1:
                    split[group.request_id] = group
            sequence.tokens[sequence.known] = token
            sequence.known += 1
            stops = token in group.stop_tokens
            text = sequence.text.push(token) if sequence.text is not None and not stops else ""
            if stops or (sequence.text is not None and sequence.text.stopped):
                events.append(self._end(sequence, (token,), text, FinishedBy.STOP))
            elif sequence.known == sequence.limit:
                events.append(self._end(sequence, (token,), text, FinishedBy.LENGTH))
            else:
                events.append(Event(group.request_id, sequence.index, (token,), text))
        for group in split.values():
            children = [each for each in group.sequences[1:] if each.finished_by is None]
            if children:
                self._queues.forks.append((group.sequences[0], children))
        return events

    def _end(self, sequence: Sequence, tokens: tuple[int, ...], text: str, by: FinishedBy) -> Event:
        group = sequence.group
        sequence.finished_by = by
        if sequence.text is not None:
            text += sequence.text.close()
        self._queues.end(sequence)
        output = None
        if group.finished:
            output = group.output()
            del self._groups[group.request_id]
        return Event(group.request_id, sequence.index, tokens, text, by, output)

    def _prompt(self, prompt: str | Ids[int]) -> list[int]:
        if isinstance(prompt, str):
            tokenizer: Any = self._model.tokenizer
            if tokenizer is None:
                raise InvalidArgumentError.of("prompt", "is text, and the model has no tokenizer")
            ids: list[int] = tokenizer(prompt)["input_ids"]
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise InvalidArgumentError.of("prompt", "must have at least one token")
        if min(ids) < 0 or max(ids) >= self._model.vocabulary:
            raise InvalidArgumentError.of("prompt", f"token ids must be in 0..{self._model.vocabulary - 1}")
        return ids
