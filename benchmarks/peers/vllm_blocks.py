"""vLLM's KV-cache classes under the workloads of `cache_core.py`; runs in vLLM's own environment.

Reads one JSON list a line, `[workload, arguments…]`, and answers with samples in nanoseconds of thread CPU
time. Imports nothing of kvplane.
"""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false

import gc
import json
import random
import sys
import time

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

BLOCK = 16
VOCABULARY = 128_000

now = time.thread_time_ns
spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
kv_cache_utils.init_none_hash(hashing.sha256)
hasher = kv_cache_utils.get_request_block_hasher(BLOCK, hashing.sha256)
serial = 0


def manager(num_blocks):
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        kv_cache_config=config,
        max_model_len=1 << 20,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        enable_caching=True,
        enable_kv_cache_events=False,
        log_stats=False,
    )


def request(tokens):
    global serial
    serial += 1
    return Request(
        request_id=f"request-{serial}",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1 << 20),
        pooling_params=None,
        block_hasher=hasher,
    )


def random_tokens(count, seed):
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(count)]


def decode(rows, steps, seed):
    source = random.Random(seed)
    blocks = manager(rows * (512 // BLOCK + steps // BLOCK + 4) + 8)
    requests = []
    for row in range(rows):
        length = 256 + source.randrange(256)
        each = request(random_tokens(length, seed * 10_000 + row))
        assert blocks.allocate_slots(each, length) is not None
        each.num_computed_tokens = length
        each.status = RequestStatus.RUNNING
        requests.append(each)
    gc.collect()
    samples = []
    for index in range(steps):
        token = index * 7919 % VOCABULARY
        start = now()
        for each in requests:
            each.append_output_token_ids(token)
        for each in requests:
            if blocks.allocate_slots(each, 1) is None:
                raise RuntimeError("the pool is too small")
            each.num_computed_tokens += 1
        samples.append(now() - start)
    return samples


def admit_cold(tokens, runs, seed):
    samples = []
    for run in range(runs):
        blocks = manager(tokens // BLOCK * 2 + 64)
        prompt = random_tokens(tokens, seed + run)
        gc.collect()
        start = now()
        each = request(prompt)
        hit, count, _ = blocks.get_computed_blocks(each)
        got = blocks.allocate_slots(each, tokens, count, hit)
        samples.append(now() - start)
        assert got is not None
    return samples


def admit_warm(tokens, runs, seed):
    samples = []
    blocks = manager(tokens // BLOCK * 2 + 64)
    prompt = random_tokens(tokens, seed)
    first = request(prompt)
    assert blocks.allocate_slots(first, tokens) is not None
    for run in range(runs):
        longer = prompt + random_tokens(BLOCK, seed + run + 1)
        gc.collect()
        start = now()
        each = request(longer)
        hit, count, _ = blocks.get_computed_blocks(each)
        got = blocks.allocate_slots(each, BLOCK, count, hit)
        samples.append(now() - start)
        assert got is not None
        assert count == tokens
        blocks.free(each)
    return samples


def evict(runs, seed):
    prompts, tokens = 64, 2048
    blocks = manager(prompts * tokens // BLOCK + 1)
    samples = []
    gc.collect()
    for run in range(prompts + runs):
        each = request(random_tokens(tokens, seed + run))
        start = now()
        got = blocks.allocate_slots(each, tokens)
        took = now() - start
        assert got is not None
        if run >= prompts:
            samples.append(took)
        blocks.free(each)
    return samples


def answer(value):
    print(json.dumps(value), flush=True)


gc.collect()
gc.freeze()  # as vLLM's engine core does after start-up
answer({"vllm": vllm.__version__, "torch": torch.__version__, "python": sys.version.split()[0]})
workloads = {"decode": decode, "admit_cold": admit_cold, "admit_warm": admit_warm, "evict": evict}
for line in sys.stdin:
    name, *arguments = json.loads(line)
    answer({"samples": workloads[name](*arguments)})
