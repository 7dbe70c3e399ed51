"""SmolLM2 on real prompts: texts, streams, stop strings; and sampling. In both modes, over chunks, hits, preemption."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine_rig import Pool, pool_for
from kvplane.client.integrations.transformers import FinishedBy, LoadedModel, SamplingParams, default_model
from kvplane.client.integrations.transformers.sampling import Sampler, sample
from kvplane.client.integrations.transformers.streaming import TextStream

COUNT = 12


@pytest.fixture(scope="module")
def chats(smollm: LoadedModel, texts: list[str]) -> list[list[int]]:
    """Token ids of six prompts of different lengths, at most 200 tokens each."""
    encoded = sorted(
        (smollm.tokenizer(text)["input_ids"][:200] for text in set(texts)), key=lambda ids: (len(ids), ids)
    )
    return [encoded[place] for place in np.linspace(0, len(encoded) - 1, 6).astype(int)]


@pytest.fixture(scope="module")
def expected(plain_smollm: PreTrainedModel, chats: list[list[int]]) -> list[tuple[int, ...]]:
    """What plain transformers generates."""
    answers = []
    for prompt in chats:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = plain_smollm.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=COUNT, pad_token_id=2)  # type: ignore[operator]
        answers.append(tuple(out[0, len(prompt) :].tolist()))
    return answers


@pytest.fixture(scope="module")
def pool(smollm: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool_for(tmp_path_factory.mktemp("kv"), smollm) as made:
        yield made


def test_generate_as_transformers_does(pool: Pool, chats: list[list[int]], expected: list[tuple[int, ...]]) -> None:
    """A batch in chunks; then the same from what the first run cached, over the wire."""
    with pool.engine(max_batch_tokens=128, max_running=8) as engine:
        outputs = engine.generate(chats, SamplingParams(max_new_tokens=COUNT))
        engine.session.flush()
    assert [output.token_ids for output in outputs] == expected
    with pool.engine("remote") as engine:
        again = engine.generate(chats[:3], SamplingParams(max_new_tokens=COUNT))
    assert [output.token_ids for output in again] == expected[:3]
    for output in again:
        assert output.metrics.cached_tokens == (output.metrics.prompt_tokens - 1) // 16 * 16


def test_preempted(
    smollm: LoadedModel, chats: list[list[int]], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """A pool with room for the longest prompt and little else."""
    blocks = -(-(len(chats[-1]) + COUNT) // 16) + 4
    with pool_for(tmp_path, smollm, num_blocks=blocks) as tiny, tiny.engine() as engine:
        outputs = engine.generate(chats, SamplingParams(max_new_tokens=COUNT))
    assert [output.token_ids for output in outputs] == expected


def test_stream_and_stop_strings(pool: Pool, smollm: LoadedModel) -> None:
    """The pieces of a stream are the text; a stop string cuts it, and nothing of it was told before."""
    question = [{"role": "user", "content": "Write one sentence about the sea."}]
    with pool.engine() as engine:
        prompt = engine.encode_chat(question)
        events = list(engine.stream(prompt, SamplingParams(max_new_tokens=24)))
        (whole,) = engine.generate([prompt], SamplingParams(max_new_tokens=24))
        stop = whole.text[12:17]
        pieces = list(engine.stream(prompt, SamplingParams(max_new_tokens=24, stop_strings=("never seen", stop))))
        abandoned = engine.stream(prompt, SamplingParams(max_new_tokens=24))
        next(abandoned)
        abandoned.close()  # type: ignore[attr-defined]
        assert engine.unfinished == 0
        engine.settle()
    assert "".join(event.text for event in events) == whole.text
    assert whole.text == smollm.tokenizer.decode(list(whole.token_ids), skip_special_tokens=True)
    assert "".join(event.text for event in pieces) == whole.text[: whole.text.index(stop)]
    assert pieces[-1].finished_by is FinishedBy.STOP
    assert pieces[-1].output is not None
    assert pieces[-1].output.text == whole.text[: whole.text.index(stop)]


@pytest.mark.parametrize("text", ["naïve café 🙂🙂 ∑x²", "plain words and  spaces\n\n", "日本語のテキスト"])
@pytest.mark.parametrize("stop", [(), ("zzz", "🙂x"), ("é", "words", "本語")])
def test_text_streams(smollm: LoadedModel, text: str, stop: tuple[str, ...]) -> None:
    """Pieces are never taken back, characters of several tokens come whole, stop strings end the text before them."""
    ids = smollm.tokenizer(text)["input_ids"]
    stream = TextStream(smollm.tokenizer, stop)
    told = ""
    for token in ids:
        told += stream.push(token)
        assert text.startswith(told)
        if stream.stopped:
            break
    told += stream.close()
    ends = [text.index(each) for each in stop if each in text]
    assert told == stream.text == (text[: min(ends)] if ends else text)


def test_cut_characters(smollm: LoadedModel) -> None:
    """A character whose last token never came is what the tokenizer makes of it."""
    ids = smollm.tokenizer("sun 🙂")["input_ids"][:-1]
    stream = TextStream(smollm.tokenizer)
    told = "".join(stream.push(token) for token in ids) + stream.close()
    assert told == smollm.tokenizer.decode(ids, skip_special_tokens=True)


def test_sampling_follows_the_distribution() -> None:
    """Frequencies of 8,000 draws, against probabilities computed in another way."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, 3.0]])
    for params in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.7),
        SamplingParams(temperature=1.5, top_k=4, top_p=0.8),
    ):
        weights = np.exp(logits[0].double().numpy() / params.temperature)
        ranked = np.argsort(-weights)
        if params.top_k:
            weights[ranked[params.top_k :]] = 0
        before = np.concatenate([[0.0], np.cumsum(weights[ranked] / weights.sum())[:-1]])
        weights[ranked[before >= params.top_p]] = 0
        samplers = [Sampler(params, index) for index in range(8_000)]
        drawn = np.bincount(sample(logits.expand(len(samplers), -1), samplers), minlength=6) / len(samplers)
        assert np.abs(drawn - weights / weights.sum()).max() < 0.025
        assert not drawn[weights == 0].any()


def test_greedy_and_drawn_rows_in_one_batch() -> None:
    """Each row has its own parameters; a row's draw does not depend on its neighbours."""
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=0.7, top_k=5)]
    rows = [0, 1, 2, 1, 0]
    together = sample(logits, [Sampler(params[kind], 0) for kind in rows])
    alone = [sample(logits[[row]], [Sampler(params[kind], 0)])[0] for row, kind in enumerate(rows)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())
    assert together[4] == int(logits[4].argmax())


def test_processes_convert_once(tmp_path: Path) -> None:
    """Two processes that ask for the model at the same time get one folder, and it was converted once."""
    code = (
        "from kvplane.client.integrations.transformers import packaged, default_model; "
        "packaged._convert = lambda source, target: ((target / 'made').touch(), __import__('time').sleep(0.5)); "
        "print('folder', default_model())"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | environment)
        for _ in range(2)
    ]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert len({line for text in said for line in text.splitlines() if line.startswith("folder")}) == 1
    assert sum("converting" in text for text in said) == 1
    assert default_model().is_dir()
