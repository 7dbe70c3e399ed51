"""The cache service ends and starts again while engines generate: the tokens are what they would have been."""

import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine_rig import Pool, greedy, pool_for, prompts
from kvplane.client.integrations.transformers import LoadedModel, Output, Request, SamplingParams


def generate_with_restarts(pool: Pool, engine: Any, asked: list[list[int]], at: set[int], count: int) -> list[Output]:
    """Answers in the order of the prompts; the service restarts while the steps numbered `at` run."""
    ids = [engine.add(Request(prompt, SamplingParams(max_new_tokens=count))) for prompt in asked]
    outputs: dict[int, Output] = {}
    restarts: list[threading.Thread] = []
    step = 0
    while engine.unfinished:
        step += 1
        assert step < 2_000
        if step in at:
            restarts.append(threading.Thread(target=pool.restart_service))
            restarts[-1].start()
        outputs.update({event.request_id: event.output for event in engine.step() if event.output is not None})
        if restarts and step in at:
            restarts[-1].join()
    engine.settle()
    return [outputs[request_id] for request_id in ids]


@pytest.mark.parametrize("mode", ["attached", "remote"])
@pytest.mark.parametrize("num_blocks", [256, 15])
def test_tokens_do_not_change(
    tiny: LoadedModel, plain: PreTrainedModel, tmp_path: Path, mode: Any, num_blocks: int
) -> None:
    """In prefill, in decode, twice; in a roomy pool and in one where sequences yield."""
    asked = prompts([20, 24, 60, 18, 27, 22], seed=6)
    with pool_for(tmp_path, tiny, num_blocks=num_blocks) as pool:
        with pool.engine(mode, max_batch_tokens=48, max_running=6) as engine:
            outputs = generate_with_restarts(pool, engine, asked, {2, 9, 20}, 40)
        for prompt, output in zip(asked, outputs, strict=True):
            assert output.completions[0].token_ids == greedy(plain, prompt, 40), f"prompt of {len(prompt)} tokens"


def test_what_was_cached_before_is_hit_after(tiny: LoadedModel, plain: PreTrainedModel, tmp_path: Path) -> None:
    """A prefix outlives the engine that computed it and the service that published it."""
    (prompt,) = prompts([80], seed=9)
    with pool_for(tmp_path, tiny) as pool:
        with pool.engine() as engine:
            engine.generate([prompt], SamplingParams(max_new_tokens=4))
            engine.session.flush()
        pool.restart_service()
        with pool.engine(wait_seconds=20) as engine:
            (output,) = engine.generate([[*prompt, 7]], SamplingParams(max_new_tokens=10))
    assert output.metrics.cached_tokens == 80
    assert output.completions[0].token_ids == greedy(plain, [*prompt, 7], 10)
