"""The engine's tokens are those of plain transformers, whatever is batched, cached, chunked, split or preempted."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from transformers import PreTrainedModel

from engine_rig import Pool, greedy, on_kvplane, pool_for, prompts, tiny_llama
from kvplane.client.integrations.transformers import (
    Engine,
    Event,
    FinishedBy,
    LoadedModel,
    Output,
    Request,
    SamplingParams,
)
from kvplane.wire.errors import IdentityMismatchError, InvalidArgumentError, NotFoundError
from service_rig import wait_until

LENGTHS = [5, 40, 17, 100, 16, 33, 1, 250]
Mode = Literal["attached", "remote"]
MODES: tuple[Mode, ...] = ("attached", "remote")


def check(plain: PreTrainedModel, asked: list[list[int]], outputs: Any, count: int) -> None:
    """Every completion is the greedy one."""
    for prompt, output in zip(asked, outputs, strict=True):
        expected = greedy(plain, prompt, count)
        for completion in output.completions:
            assert completion.token_ids == expected, f"prompt of {len(prompt)} tokens"
            assert completion.finished_by is FinishedBy.LENGTH


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_mixed_lengths(pool: Pool, plain: PreTrainedModel, mode: Mode) -> None:
    """Prefill in chunks of a small budget, decoding beside it."""
    asked = prompts(LENGTHS, seed=1)
    with pool.engine(mode, max_batch_tokens=48, max_running=6) as engine:
        outputs = engine.generate(asked, SamplingParams(max_new_tokens=20))
        assert max(each.tokens for each in engine.timings) <= 48
    check(plain, asked, outputs, 20)


@pytest.mark.parametrize("mode", MODES)
def test_prefix_hits(pool: Pool, plain: PreTrainedModel, mode: Mode) -> None:
    """What one engine computed is there for the next, and read right."""
    system = prompts([64], seed=200 + len(mode))[0]
    asked = [system + tail for tail in prompts([9, 17, 30], seed=3)]
    with pool.engine(mode) as first:
        first.generate([asked[0]], SamplingParams(max_new_tokens=4))
        first.session.flush()
    with pool.engine(mode) as second:
        outputs = second.generate(asked, SamplingParams(max_new_tokens=12))
    check(plain, asked, outputs, 12)
    assert [output.metrics.cached_tokens for output in outputs] == [64, 64, 64]


def test_a_conversation_hits_its_own_answers(pool: Pool, plain: PreTrainedModel) -> None:
    """The answer's blocks are published when it ends: the next turn computes only what is new."""
    (prompt,) = prompts([30], seed=4)
    with pool.engine() as engine:
        (first,) = engine.generate([prompt], SamplingParams(max_new_tokens=40))
        engine.session.flush()
        turn = prompt + list(first.token_ids) + prompts([6], seed=5)[0]
        (second,) = engine.generate([turn], SamplingParams(max_new_tokens=10))
    check(plain, [turn], [second], 10)
    # 69 tokens were computed: the last sampled one never was.
    assert second.metrics.cached_tokens == 64


@pytest.mark.parametrize("mode", MODES)
def test_preemption_and_resume(tiny: LoadedModel, plain: PreTrainedModel, tmp_path: Path, mode: Mode) -> None:
    """A pool too small for what runs: sequences yield, wait, and go on with the same tokens."""
    asked = prompts([20, 24, 30, 18, 27, 22], seed=6)
    with pool_for(tmp_path, tiny, num_blocks=15) as pool, pool.engine(mode) as engine:
        outputs = engine.generate(asked, SamplingParams(max_new_tokens=40))
    check(plain, asked, outputs, 40)
    assert sum(output.metrics.preemptions for output in outputs) > 0


@pytest.mark.parametrize("mode", MODES)
def test_forks(pool: Pool, plain: PreTrainedModel, mode: Mode) -> None:
    """The prompt is computed once; greedy children agree, whether their prompt fills its last block or not."""
    asked = prompts([32, 41, 3], seed=700 + len(mode))
    with pool.engine(mode) as engine:
        outputs = engine.generate(asked, SamplingParams(max_new_tokens=20, n=3))
        assert sum(each.tokens for each in engine.timings) == sum(map(len, asked)) + 3 * 3 * 19
    check(plain, asked, outputs, 20)


def test_forks_in_a_tiny_pool(tiny: LoadedModel, plain: PreTrainedModel, tmp_path: Path) -> None:
    """Children that do not fit wait, and parents that yield before they split are computed again."""
    asked = prompts([40, 37], seed=8)
    with pool_for(tmp_path, tiny, num_blocks=12) as pool, pool.engine() as engine:
        outputs = engine.generate(asked, SamplingParams(max_new_tokens=30, n=4))
    check(plain, asked, outputs, 30)


def test_seeds(pool: Pool) -> None:
    """Completions of a request differ, the same seed draws the same, whatever else is in the batch."""
    asked = prompts([20, 33], seed=9)
    params = SamplingParams(max_new_tokens=12, temperature=1.0, top_k=50, top_p=0.95, seed=7, n=3)
    with pool.engine() as engine:
        together = engine.generate(asked, params)
        alone = engine.generate(asked[:1], params)
        other = engine.generate(asked[:1], SamplingParams(max_new_tokens=12, temperature=1.0, seed=8, n=3))
    drawn = [completion.token_ids for completion in together[0].completions]
    assert len(set(drawn)) == 3
    assert [completion.token_ids for completion in alone[0].completions] == drawn
    assert [completion.token_ids for completion in other[0].completions] != drawn


@pytest.mark.parametrize("mode", MODES)
def test_two_shards(tmp_path: Path, plain: PreTrainedModel, tiny: LoadedModel, mode: Mode) -> None:
    """KV heads split over two compute services."""
    asked = prompts([30, 50, 12], seed=10)
    with pool_for(tmp_path, tiny, tensor_parallel=2) as pool, pool.engine(mode) as engine:
        outputs = engine.generate(asked, SamplingParams(max_new_tokens=16, n=2))
    check(plain, asked, outputs, 16)


def test_two_engines_revoke_each_other(tiny: LoadedModel, plain: PreTrainedModel, tmp_path: Path) -> None:
    """Two sessions take turns on a pool that holds only a part of what they run."""
    params = SamplingParams(max_new_tokens=45)
    early, late = prompts([25, 21, 30], seed=11), prompts([28, 22, 19], seed=12)
    with pool_for(tmp_path, tiny, num_blocks=13) as pool:
        with (
            Engine.open(tiny, address=pool.service.address) as first,
            Engine.open(tiny, address=pool.service.address) as second,
        ):
            asked = [
                (engine, engine.add(Request(prompt, params)), prompt)
                for engine, batch in ((first, early), (second, late))
                for prompt in batch
            ]
            outputs: dict[tuple[int, int], Any] = {}
            while first.unfinished or second.unfinished:
                for engine in (first, second):
                    for event in engine.step():
                        if event.output is not None:
                            outputs[id(engine), event.request_id] = event.output
            first.settle()
            second.settle()
        pool.check_nothing_held()
    for engine, request_id, prompt in asked:
        check(plain, [prompt], [outputs[id(engine), request_id]], 45)
    assert sum(output.metrics.preemptions for output in outputs.values()) > 0


def test_stop_tokens_and_lengths(pool: Pool, plain: PreTrainedModel) -> None:
    """A stop token ends a completion and stays in it; the model's longest sequence ends it too."""
    (prompt,) = prompts([20], seed=13)
    expected = greedy(plain, prompt, 30)
    stop = expected[10]
    end = expected.index(stop)
    with pool.engine() as engine:
        (stopped,) = engine.generate([prompt], SamplingParams(max_new_tokens=30, stop_token_ids=(stop,)))
        long = prompts([1020], seed=14)[0]
        (full,) = engine.generate([long], SamplingParams(max_new_tokens=100))
        (one,) = engine.generate([prompt], SamplingParams(max_new_tokens=1, n=2))
    assert stopped.token_ids == expected[: end + 1]
    assert stopped.completions[0].finished_by is FinishedBy.STOP
    assert len(full.token_ids) == 4
    assert [each.token_ids for each in one.completions] == [expected[:1]] * 2


def test_abort(pool: Pool, plain: PreTrainedModel) -> None:
    """In every phase; the others go on, and nothing is left behind."""
    asked = prompts([30, 25, 40], seed=15)
    params = SamplingParams(max_new_tokens=20, n=2)
    with pool.engine() as engine:
        ids = [engine.add(Request(prompt, params)) for prompt in asked]
        waiting = engine.abort(ids[0])
        assert [event.finished_by for event in waiting] == [FinishedBy.ABORT] * 2
        events: list[Event] = []
        while not any(event.request_id == ids[1] for event in events):
            events += engine.step()
        running = engine.abort(ids[1])
        assert running[-1].output is not None
        assert len(running[-1].output.token_ids) == 1
        with pytest.raises(NotFoundError):
            engine.abort(ids[1])
        (output,) = engine.run()
    check(plain, asked[2:], [output], 20)


def test_a_pause_loses_nothing(pool: Pool, plain: PreTrainedModel) -> None:
    """A forward pass that may not be launched, since the lease was not renewed in time, is made up for later."""
    asked = prompts([30, 25], seed=19)
    with pool.engine() as engine:
        for prompt in asked:
            engine.add(Request(prompt, SamplingParams(max_new_tokens=20)))
        for _ in range(8):
            engine.step()
        lease = engine.session.state.lease
        clock = lease.clock
        lease.clock = lambda: lease.renewed_at + lease.ttl_seconds
        for _ in range(3):
            assert engine.step() == []
            lease.renewed_at = clock()
        lease.clock = clock
        outputs = engine.run()
    check(plain, asked, outputs, 20)


@pytest.mark.parametrize("mode", ["attached", "remote"])
def test_a_forward_pass_that_fails_at_its_end(pool: Pool, plain: PreTrainedModel, mode: Mode) -> None:
    """All layers were written when it failed, in prefill, at a block's end and inside one: the engine goes on with the
    same tokens, though written slots take no second write."""
    asked = prompts([30, 31, 17, 45], seed=23)
    with pool.engine(mode, max_batch_tokens=64, max_running=8) as engine:
        for prompt in asked:
            engine.add(Request(prompt, SamplingParams(max_new_tokens=20)))
        outputs: dict[int, Output] = {}
        step = failures = 0
        while engine.unfinished:
            step += 1
            assert step < 400
            try:
                with failing(engine) if step % 7 in (2, 3) else nullcontext():
                    events = engine.step()
            except RuntimeError:
                failures += 1
                continue
            outputs.update({each.request_id: each.output for each in events if each.output is not None})
        engine.settle()
    assert failures > 2
    check(plain, asked, [outputs[request_id] for request_id in sorted(outputs)], 20)


@contextmanager
def failing(engine: Engine) -> Iterator[None]:
    """Every forward pass fails behind its last layer."""

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    hook = engine.model.module.lm_head.register_forward_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def test_an_error_leaves_nothing_behind(pool: Pool, plain: PreTrainedModel) -> None:
    """What `generate` and `stream` asked for ends with them, and holds nothing: a bad prompt beside good ones, a
    forward pass that fails, an iteration that is left."""
    (prompt,) = prompts([40], seed=24)
    params = SamplingParams(max_new_tokens=8)
    with pool.engine() as engine:
        with pytest.raises(InvalidArgumentError):
            engine.generate([prompt, []], params)
        assert engine.unfinished == 0
        with failing(engine), pytest.raises(RuntimeError, match="on purpose"):
            engine.generate([prompt], params)
        assert engine.unfinished == 0
        with failing(engine), pytest.raises(RuntimeError, match="on purpose"):
            list(engine.stream(prompt, params))
        assert engine.unfinished == 0
        engine.settle()
        for _ in engine.stream(prompt, params):
            break
        pool.check_nothing_held()
        (output,) = engine.generate([prompt], params)
    check(plain, [prompt], [output], 8)


def test_a_stream_that_breaks_behind_the_last_token(pool: Pool, plain: PreTrainedModel) -> None:
    """The shard never said that the last plan is closed: it is asked again, and the engine does not wait for ever."""
    (prompt,) = prompts([40], seed=26)
    with pool.engine("remote") as engine:

        def cut(*_: object) -> None:
            stream = engine.compute.links[0].stream  # type: ignore[attr-defined]
            stream._call.cancel()  # noqa: SLF001
            wait_until(lambda: stream.error is not None, "the stream is broken")

        hook = engine.model.module.lm_head.register_forward_hook(cut)
        try:
            (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=1))
        finally:
            hook.remove()
        pool.check_nothing_held()
    check(plain, [prompt], [output], 1)


def test_an_interrupt_while_a_result_is_awaited(
    pool: Pool, plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves a step without its result: the next iteration takes that first."""
    asked = prompts([30, 20], seed=25)
    with pool.engine() as engine:
        for prompt in asked:
            engine.add(Request(prompt, SamplingParams(max_new_tokens=8)))
        for _ in range(4):
            with monkeypatch.context() as patch:
                patch.setattr(engine.session, "collect", _interrupt)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            engine.step()
        outputs = engine.run()
        assert engine.session.state.unanswered == 0
    check(plain, asked, outputs, 8)


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_bad_requests_change_nothing(pool: Pool) -> None:
    """Refused with the field named, before anything is queued."""
    with pool.engine() as engine:
        for prompt, field in (
            ([], "prompt"),
            ([320], "prompt"),
            ([-1], "prompt"),
            ("text", "prompt"),
            ([5] * 1024, "prompt"),
        ):
            with pytest.raises(InvalidArgumentError) as error:
                engine.add(prompt)
            assert error.value.violations[0].field == field
        with pytest.raises(InvalidArgumentError):
            SamplingParams(top_p=0.0)
        assert engine.unfinished == 0
        assert engine.step() == []


def test_another_model_is_refused(pool: Pool) -> None:
    """A pool holds one model's cache."""
    other = on_kvplane(tiny_llama(), "other weights")
    with pytest.raises(IdentityMismatchError), Engine.open(other, address=pool.service.address):
        pass


def test_priorities(tiny: LoadedModel, plain: PreTrainedModel, tmp_path: Path) -> None:
    """The important request, though last, is admitted first."""
    asked = prompts([30] * 4, seed=16)
    with pool_for(tmp_path, tiny, num_blocks=8) as pool, pool.engine(max_running=1) as engine:
        params = SamplingParams(max_new_tokens=8)
        ids = [
            engine.add(Request(prompt, params, priority=0 if place == 3 else 1)) for place, prompt in enumerate(asked)
        ]
        outputs = engine.run()
    assert [output.request_id for output in outputs] == [ids[3], *ids[:3]]
    check(plain, [asked[3], *asked[:3]], outputs, 8)


def test_random_loads(tiny: LoadedModel, plain: PreTrainedModel, tmp_path: Path) -> None:
    """Many short requests of all kinds in a pool where they always get in each other's way."""
    rng = np.random.default_rng(17)
    shared = prompts([32], seed=18)[0]
    with pool_for(tmp_path, tiny, num_blocks=20) as pool:
        for _ in range(3):
            asked = [
                (shared if rng.random() < 0.5 else []) + tail
                for tail in prompts(rng.integers(1, 60, 8).tolist(), seed=int(rng.integers(1 << 30)))
            ]
            params = [SamplingParams(max_new_tokens=int(rng.integers(1, 30)), n=int(rng.integers(1, 4))) for _ in asked]
            with pool.engine(max_batch_tokens=int(rng.integers(16, 80)), max_running=16) as engine:
                outputs = engine.generate(asked, params)
            for prompt, each, output in zip(asked, params, outputs, strict=True):
                check(plain, [prompt], [output], each.max_new_tokens)
