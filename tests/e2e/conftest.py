"""Models and pools that several test modules share."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine_rig import Pool, on_kvplane, pool_for, tiny_llama
from kvplane import kernels
from kvplane.client.integrations.transformers import LoadedModel, default_model, load_model

TEXTS = Path(__file__).parents[2] / ".." / "shared" / "data" / "agent_text.jsonl"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Models this small wait for their threads more than they compute, and the services need a core as well."""
    torch.set_num_threads(1)
    kernels.set_num_threads(1)


@pytest.fixture(scope="session")
def plain() -> PreTrainedModel:
    """The tiny model with transformers' own attention: the truth."""
    return tiny_llama()


@pytest.fixture(scope="session")
def tiny(plain: PreTrainedModel) -> LoadedModel:
    """The same weights on kvplane."""
    return on_kvplane(plain)


@pytest.fixture(scope="module")
def pool(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A roomy pool for the tiny model."""
    with pool_for(tmp_path_factory.mktemp("kv"), tiny) as made:
        yield made


@pytest.fixture(scope="session")
def smollm() -> LoadedModel:
    """SmolLM2 in float32 on kvplane."""
    return load_model(dtype=torch.float32)


@pytest.fixture(scope="session")
def plain_smollm() -> PreTrainedModel:
    """SmolLM2 in float32 with transformers' own attention."""
    folder = default_model()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Real prompts of agents where they are at hand (`KVPLANE_AGENT_TEXT` or beside the checkout), else made ones."""
    path = Path(os.environ.get("KVPLANE_AGENT_TEXT") or TEXTS)
    if path.is_file():
        with path.open() as lines:
            found = [json.loads(line)["input"] for _, line in zip(range(60), lines, strict=False)]
        return [text for text in found if text]
    subjects = ["the order", "a flight to Rome", "the parser's tests", "my account", "two blue lamps", "the build"]
    return [
        f"User: I have a question about {subject}. "
        + f"It concerns item {index} and what happens next. " * (1 + index % 9)
        for index, subject in enumerate(subjects * 6)
    ]
