"""What the kernels reach on a GPU, against its own copy bandwidth and other kernels: `attention.py --device cuda`, or
this file by itself where there is no numba.

Everything is timed by events on one stream, in turns; a call is repeated so that launches do not count. Sizes stream
from memory (KV of 1 GiB), blocks are in random order. Prints one table.
"""

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from _machine import finish
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvplane import kernels
from kvplane.kernels import PagedKv
from kvplane.kernels.cuda import work
from kvplane.kernels.cuda.runtime import runtime_of, why_not
from kvplane.kernels.cuda.warm_up import warm_up

BLOCK_SIZE, QUERY_HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
DTYPE = torch.bfloat16
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
SPLITS = (128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    what: str
    milliseconds: float
    rate: float
    unit: str


def timed(calls: dict[str, Callable[[], object]], rounds: int, repeats: int = 5) -> dict[str, float]:
    """Median milliseconds of each call, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # torch has no type here
            begin.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / repeats)
    return {name: statistics.median(times) for name, times in samples.items()}


def random_layer(tokens: int, device: torch.device) -> PagedKv:
    """A layer of random contents."""
    shape = (tokens // BLOCK_SIZE + 1, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    keys, values = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
    return PagedKv.of(keys, values)


def random_tables(sequences: int, tokens: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Tables in which no block follows its neighbour."""
    return (np.random.permutation(sequences * tokens // BLOCK_SIZE) + 1).reshape(sequences, -1)


def flashinfer_decode(layer: PagedKv, tables: Any, tokens: int, query: Tensor) -> Callable[[], object] | None:
    """FlashInfer's batch decode on the same blocks; None when it is not installed or refuses."""
    try:
        flashinfer = importlib.import_module("flashinfer")

        device, (sequences, width) = query.device, tables.shape
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(
            torch.arange(sequences + 1, dtype=torch.int32, device=device) * width,
            torch.from_numpy(tables.ravel()).to(device, torch.int32),
            torch.full((sequences,), (tokens - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=device),
            QUERY_HEADS,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )
        cache = (layer.keys[0], layer.values[0])
        wrapper.run(query, cache)
        return lambda: wrapper.run(query, cache)
    except Exception as error:  # whatever a peer of any version may raise is told, and the rest goes on
        print(f"  flashinfer: not compared ({type(error).__name__}: {str(error)[:120]})")
        return None


def vllm_decode(layer: PagedKv, tables: Any, tokens: int, query: Tensor) -> Callable[[], object] | None:
    """vLLM's Triton unified attention on a cache of the same size in its layout; None when it is not there."""
    try:
        unified_attention = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
        device, sequences = query.device, tables.shape[0]
        key, value = (part[0].transpose(1, 2).contiguous() for part in (layer.keys, layer.values))
        ones = torch.ones(sequences, KV_HEADS, dtype=torch.float32, device=device)
        arguments = {
            "q": query,
            "k": key,
            "v": value,
            "out": torch.empty_like(query),
            "cu_seqlens_q": torch.arange(sequences + 1, dtype=torch.int32, device=device),
            "max_seqlen_q": 1,
            "seqused_k": torch.full((sequences,), tokens, dtype=torch.int32, device=device),
            "max_seqlen_k": tokens,
            "softmax_scale": HEAD_DIM**-0.5,
            "causal": True,
            "window_size": (-1, -1),
            "block_table": torch.from_numpy(tables).to(device, torch.int32),
            "softcap": 0.0,
            "q_descale": None,
            "k_descale": ones,
            "v_descale": ones,
        }
        unified_attention(**arguments)
        return lambda: unified_attention(**arguments)
    except Exception as error:  # as above
        print(f"  vllm: not compared ({type(error).__name__}: {str(error)[:120]})")
        return None


def measure_decode(
    device: torch.device, sequences: int, tokens: int, rounds: int
) -> tuple[list[Row], dict[str, float]]:
    """One decode step of a layer, against a copy of as many bytes, contiguous SDPA and other kernels."""
    layer, tables = random_layer(sequences * tokens, device), random_tables(sequences, tokens)
    query = torch.randn(sequences, QUERY_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    lengths = [tokens] * sequences
    plan = kernels.plan(layer.geometry, tables, lengths, num_query_heads=QUERY_HEADS)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2], device=device)
    packed = query.view(sequences, KV_HEADS, -1, HEAD_DIM)
    key, value = (torch.randn(sequences, KV_HEADS, tokens, HEAD_DIM, dtype=DTYPE, device=device) for _ in range(2))
    target = torch.empty_like(layer.keys[0])
    calls: dict[str, Callable[[], object]] = {
        "kvplane": lambda: kernels.attend(plan, query, layer, out=out, lse=lse),
        "device copy": lambda: target.copy_(layer.keys[0]),
        "SDPA, contiguous": lambda: scaled_dot_product_attention(packed, key, value),
    }
    for name, peer in (("flashinfer", flashinfer_decode), ("vllm triton", vllm_decode)):
        found = peer(layer, tables, tokens, query)
        if found is not None:
            calls[name] = found
    usual = work.NARROW_SPLIT
    try:
        for split in SPLITS:
            if split != usual:
                work.NARROW_SPLIT = split
                other = kernels.plan(layer.geometry, tables, lengths, num_query_heads=QUERY_HEADS)
                calls[f"kvplane, splits of {split}"] = lambda p=other: kernels.attend(  # type: ignore[misc] # defaults bind early
                    p, query, layer, out=out, lse=lse
                )
    finally:
        work.NARROW_SPLIT = usual
    times = timed(calls, rounds)
    # A copy reads and writes what it moves.
    moved = dict.fromkeys(times, sequences * tokens * TOKEN_BYTES) | {"device copy": 2 * target.nbytes}
    rates = {name: moved[name] / ms / 1e6 for name, ms in times.items()}
    title = f"decode {sequences} x {tokens}"
    rows = [Row(f"{title}, {name}", ms, rates[name], "GB/s") for name, ms in times.items()]
    ratios = {f"decode_{sequences}x{tokens}_over_copy": rates["kvplane"] / rates["device copy"]}
    ratios |= {
        f"decode_{sequences}x{tokens}_over_{name.split()[0].strip(',').lower()}": rates["kvplane"] / rates[name]
        for name in ("SDPA, contiguous", "flashinfer", "vllm triton")
        if name in rates
    }
    return rows, ratios


def measure_prefill(device: torch.device, new: int, prefix: int, rounds: int) -> tuple[list[Row], dict[str, float]]:
    """A chunk over a paged prefix, against SDPA on contiguous keys with a mask."""
    total = new + prefix
    layer = random_layer(total, device)
    plan = kernels.plan(layer.geometry, random_tables(1, total), [total], [new], num_query_heads=QUERY_HEADS)
    query = torch.randn(new, QUERY_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    key, value = (torch.randn(1, KV_HEADS, total, HEAD_DIM, dtype=DTYPE, device=device) for _ in range(2))
    mask = torch.arange(prefix, total, device=device)[:, None] >= torch.arange(total, device=device)
    rows = query.transpose(0, 1)[None]
    times = timed(
        {
            "kvplane": lambda: kernels.attend(plan, query, layer),
            "SDPA, contiguous": lambda: scaled_dot_product_attention(rows, key, value, attn_mask=mask, enable_gqa=True),
        },
        rounds,
    )
    work_done = 4 * QUERY_HEADS * HEAD_DIM * (new * prefix + new * (new + 1) / 2)
    table = [
        Row(f"prefill {new} over {prefix}, {name}", ms, work_done / ms / 1e9, "TFLOP/s") for name, ms in times.items()
    ]
    return table, {f"prefill_{new}_over_sdpa": times["SDPA, contiguous"] / times["kvplane"]}


def measure_moves(device: torch.device, rounds: int) -> tuple[list[Row], dict[str, float]]:
    """Writes of new tokens, copies of blocks, and the plan on the host."""
    layer = random_layer(1 << 17, device)
    blocks = layer.geometry.num_blocks
    table = []
    for tokens in (32, 4096):
        slots = BLOCK_SIZE + np.random.permutation((blocks - 1) * BLOCK_SIZE)[:tokens]
        empty = np.empty((0, 0), np.int64)
        plan = kernels.plan(layer.geometry, empty, [], num_query_heads=QUERY_HEADS, padding_tokens=tokens, slots=slots)
        rows = torch.randn(tokens, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
        (ms,) = timed({"write": lambda p=plan, r=rows: kernels.write(p, r, r, layer)}, rounds).values()  # type: ignore[misc] # defaults bind early
        table.append(Row(f"write {tokens} tokens", ms, tokens * TOKEN_BYTES / ms / 1e6, "GB/s written"))
    half = (blocks - 1) // 2
    order = np.random.permutation(2 * half) + 1
    (ms,) = timed({"copy": lambda: kernels.copy_blocks(layer, order[:half], order[half:])}, rounds).values()
    table.append(Row(f"copy {half} blocks", ms, 2 * half * BLOCK_SIZE * TOKEN_BYTES / ms / 1e6, "GB/s read + written"))
    return table, {}


def main(*, quick: bool) -> dict[str, object] | None:
    """Measure and print; None, after a line that says why, when there is no device."""
    reason = why_not()
    if reason is not None:
        print(f"no device: {reason}")
        return None
    device = runtime_of(0).torch_device
    print(f"device: {torch.cuda.get_device_name(device)}, {torch.cuda.get_device_properties(device)}")
    for package in ("torch", "triton", "cupy-cuda13x", "flashinfer-python", "vllm"):
        try:
            print(f"  {package} {version(package)}")
        except PackageNotFoundError:
            print(f"  {package}: not installed")
    print(f"warm-up: {warm_up(device, DTYPE, HEAD_DIM):.1f} s")
    rounds = 3 if quick else 15
    table: list[Row] = []
    results: dict[str, object] = {"device": torch.cuda.get_device_name(device)}
    for rows, ratios in (
        measure_decode(device, 32, 8192, rounds),
        measure_decode(device, 8, 32768, rounds),
        measure_decode(device, 1, 1 << 18, rounds),
        measure_prefill(device, 2048, 6144, rounds),
        measure_moves(device, rounds),
    ):
        table += rows
        results |= {name: round(value, 3) for name, value in ratios.items()}
        torch.cuda.empty_cache()
    print()
    for row in table:
        print(f"{row.what:56} {row.milliseconds:10.3f} ms {row.rate:10.1f} {row.unit}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    measured = main(quick=parser.parse_args().quick)
    finish(measured or {"device": None})
    sys.exit(0 if measured else 2)
