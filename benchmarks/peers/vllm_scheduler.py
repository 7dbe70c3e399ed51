"""vLLM's whole control step in process (`schedule` + `update_from_output`), all requests decoding; runs in vLLM's own
environment. Prints JSON: per number of requests, milliseconds of elapsed time of each step, and the same for its
KV-cache part alone (allocate + hash). Imports nothing of kvplane.

Usage: vllm_scheduler.py STEPS N [N ...]
"""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false

import gc
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, VOCABULARY, PROMPT = 16, 128_000, 256
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
kv_cache_utils.init_none_hash(hashing.sha256)
hasher = kv_cache_utils.get_request_block_hasher(BLOCK, hashing.sha256)


def kv_config(num_blocks):
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


def requests(count):
    source = random.Random(count)
    return [
        Request(
            request_id=f"request-{row}",
            prompt_token_ids=[source.randrange(VOCABULARY) for _ in range(PROMPT - row % BLOCK)],
            sampling_params=SamplingParams(max_tokens=1 << 20),
            pooling_params=None,
            block_hasher=hasher,
        )
        for row in range(count)
    ]


def scheduler(count, num_blocks, folder):
    config = VllmConfig(
        model_config=ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=32_768
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=count,
            max_num_batched_tokens=max(8192, count * PROMPT),
            max_model_len=32_768,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_config(num_blocks),
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def control_steps(count, steps, folder):
    made = scheduler(count, count * (PROMPT // BLOCK + steps // BLOCK + 4) + 8, folder)
    asked = requests(count)
    for each in asked:
        made.add_request(each)
    names = [each.request_id for each in asked]

    def output():
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    made.update_from_output(made.schedule(), output())
    gc.collect()
    samples = []
    for _ in range(steps):
        start = time.perf_counter()
        planned = made.schedule()
        between = time.perf_counter()
        result = output()
        after = time.perf_counter()
        made.update_from_output(planned, result)
        samples.append(1e3 * (time.perf_counter() - after + between - start))
    return samples


def kv_steps(count, steps):
    manager = KVCacheManager(
        kv_cache_config=kv_config(count * (PROMPT // BLOCK + steps // BLOCK + 4) + 8),
        max_model_len=1 << 20,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        enable_caching=True,
        enable_kv_cache_events=False,
        log_stats=False,
    )
    running = requests(count)
    for each in running:
        manager.allocate_slots(each, each.num_tokens)
        each.num_computed_tokens = each.num_tokens
        each.status = RequestStatus.RUNNING
    gc.collect()
    samples = []
    for _ in range(steps):
        start = time.perf_counter()
        for each in running:
            each.append_output_token_ids(7)
            manager.allocate_slots(each, 1)
            each.num_computed_tokens += 1
        samples.append(1e3 * (time.perf_counter() - start))
    return samples


def main():
    steps, counts = int(sys.argv[1]), [int(each) for each in sys.argv[2:]]
    gc.collect()
    gc.freeze()
    found = {"version": vllm.__version__}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for count in counts:
            found[str(count)] = {"control": control_steps(count, steps, folder), "kv": kv_steps(count, steps)}
    answers.write(json.dumps(found) + "\n")
    answers.flush()


main()
