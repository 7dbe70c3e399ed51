"""Both services for a model, in this process: what tests of the engine, and nothing else, are built on."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from compute_engine import running, settings
from kvplane.client.integrations.transformers import Engine, LoadedModel, adopt_model
from service_rig import RunningService, wait_until

BLOCK_TOKENS = 16


class Pool:
    """A pool for one model, with its services."""

    def __init__(
        self, service: RunningService, model: LoadedModel, num_blocks: int, start: Callable[[], RunningService]
    ) -> None:
        self.service = service
        self._start = start
        self.model = model
        self.num_blocks = num_blocks

    @contextmanager
    def engine(self, mode: Literal["attached", "remote"] = "attached", **options: Any) -> Iterator[Engine]:
        """An engine on the pool; when it leaves, nothing of it may be left in the pool."""
        with Engine.open(self.model, mode=mode, address=self.service.address, **options) as engine:
            yield engine
        self.check_nothing_held()

    def restart_service(self) -> None:
        """End the cache service, and with it all that it knew; start it again at the same address."""
        self.service.stop()
        self.service = self._start()

    def check_nothing_held(self) -> None:
        """Every block is free or cached, and the invariants hold."""
        wait_until(lambda: self.idle_blocks() == self.num_blocks - 1, "every block is free or cached")
        self.service.check_integrity()

    def idle_blocks(self) -> int:
        """Blocks that nobody holds and nothing defers."""
        core = self.service.server.plane.pools["default"]
        stats = self.service.on_loop(core.stats)
        return int(stats.free_blocks + stats.cached_blocks)


@contextmanager
def pool_for(
    folder: Path,
    model: LoadedModel,
    num_blocks: int = 256,
    *,
    block_tokens: int = BLOCK_TOKENS,
    tensor_parallel: int = 1,
    **cache_settings: Any,
) -> Iterator[Pool]:
    """A cache service and as many compute services as there are shards."""

    def start() -> RunningService:
        return RunningService(folder, **cache_settings)

    made = Pool(start(), model, num_blocks, start)
    try:
        with ExitStack() as stack:
            for rank in range(tensor_parallel):
                values = settings(
                    folder,
                    f"compute-{rank}",
                    **model.compute_settings(),
                    block_tokens=block_tokens,
                    max_blocks=num_blocks,
                    pool_bytes=1 << 30,
                    rank=rank,
                    tensor_parallel=tensor_parallel,
                    memory_folder=folder / f"memory-{rank}",
                )
                stack.enter_context(running(values))
            made.service.wait_ready()
            yield made
    finally:
        made.service.stop()


def tiny_llama(**changes: Any) -> PreTrainedModel:
    """A random Llama: float32, grouped-query attention, weights large enough that its answers differ."""
    values: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": None,
    }
    return seeded(LlamaForCausalLM, LlamaConfig(**(values | changes)))


def seeded(kind: Any, config: Any) -> PreTrainedModel:
    """A model with the same random weights every time."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config).eval()
    torch.set_rng_state(state)
    return model


def on_kvplane(model: PreTrainedModel, name: str = "tiny") -> LoadedModel:
    """The model with its attention on a pool; the module given keeps its own, with the same weights."""
    kind: Any = type(model)
    twin = kind(model.config.__class__.from_dict(model.config.to_dict()))
    twin.load_state_dict(model.state_dict())
    return adopt_model(twin, None, name)


def prompts(lengths: list[int], vocabulary: int = 320, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocabulary, length).tolist() for length in lengths]


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> tuple[int, ...]:
    """What plain transformers answers, the slow and simple way: the whole sequence again for each token."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            following = model(tokens, use_cache=False).logits[0, -1].argmax()
            tokens = torch.cat([tokens, following.view(1, 1)], 1)
    return tuple(tokens[0, len(prompt) :].tolist())


def logits_of(model: PreTrainedModel, tokens: list[int]) -> NDArray[np.float32]:
    """Logits of every position, by plain transformers."""
    with torch.inference_mode():
        found: NDArray[np.float32] = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return found
