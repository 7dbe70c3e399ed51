"""The part of `data_plane.py` about attached engines: kernels on the mapped pool against bare ones."""

import functools
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from _data_plane_rig import BATCH, BLOCK_TOKENS, DTYPE, LAYERS, rows, service, timed
from _machine import line

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from compute_attached import attach
from kvplane import kernels
from kvplane.kernels import PagedKv
from kvplane.v1 import types_pb2
from kvplane.wire import stamps

KERNEL_MS = 5.0
"""What a kernel takes at least whose overhead is looked at."""


def long_context(heads: int, kv_heads: int, dim: int) -> int:
    """Tokens at which decoding one layer takes one and a half times `KERNEL_MS` here, a power of two."""
    context = 2048
    while True:
        per_sequence = context // BLOCK_TOKENS
        shape = (BATCH * per_sequence + 1, kv_heads, BLOCK_TOKENS, dim)
        layer = PagedKv.of(*(torch.randn(shape).to(DTYPE) for _ in range(2)))
        order = np.random.default_rng(0).permutation(np.arange(1, BATCH * per_sequence + 1)).reshape(BATCH, -1)
        batch = kernels.plan(layer.geometry, order, [context] * BATCH, [1] * BATCH, num_query_heads=heads)
        query = rows(BATCH, heads, dim)
        attend = functools.partial(kernels.attend, batch, query, layer)
        took = statistics.median([timed(attend) for _ in range(9)])
        if took >= 1.5 * KERNEL_MS or context >= MAX_CONTEXT:
            return context
        context *= 2


MAX_CONTEXT = 32_768
"""Two layers of this are 2 GiB, and as much again on plain tensors."""


def attached(folder: Path, rounds: int) -> dict[str, float]:
    """A step of an attached engine against the kernels alone on plain tensors of the same shape, with a context long
    enough for a kernel to take `KERNEL_MS`."""
    heads, kv_heads, dim = 32, 8, 128
    context = long_context(heads, kv_heads, dim)
    per_sequence = context // BLOCK_TOKENS
    num_blocks = BATCH * per_sequence + 1
    changes = {
        "max_blocks": num_blocks,
        "num_layers": LAYERS,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "kv_dtype": "bfloat16",
    }
    with service(folder / "attached", **changes) as (control, address):
        session = control.open_session(types_pb2.SESSION_MODE_ATTACHED)
        memory = attach(address, session.session_id, session.lease_epoch, session.secret)
        layers = []
        for layer in range(LAYERS):
            key, value = (
                memory.blocks(layer, role) for role in (types_pb2.TENSOR_ROLE_KEY, types_pb2.TENSOR_ROLE_VALUE)
            )
            key.copy_(torch.randn(key.shape))
            value.copy_(torch.randn(value.shape))
            layers.append(PagedKv.of(key, value))
        plain = [PagedKv.of(*(torch.randn(layer.keys[0].shape).to(DTYPE) for _ in range(2))) for layer in layers]
        order = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).reshape(BATCH, -1)
        query, key, value = rows(BATCH, heads, dim), rows(BATCH, kv_heads, dim), rows(BATCH, kv_heads, dim)
        batch = kernels.plan(layers[0].geometry, order, [context] * BATCH, [1] * BATCH, num_query_heads=heads)
        out = torch.empty_like(query)
        bits, marks, header = memory.hold_map, memory.stamps, memory.directory.header
        occupants = control.new_blocks(order[:, -1].tolist())
        last = time.monotonic()

        def work(on: list[PagedKv]) -> None:
            for layer in on:
                kernels.write(batch, key, value, layer)
                kernels.attend(batch, query, layer, out=out)

        def step() -> None:
            for block, generation in occupants:
                bits[block // 8] |= 1 << block % 8
                marks[block] = generation
            assert header["incarnation"][0] <= stamps.incarnation_of(occupants[0][1])
            assert time.monotonic() - last < 300
            work(layers)

        samples: dict[str, list[float]] = {"attached": [], "bare": []}
        for index in range(rounds + 4):
            # Either goes first as often: what runs before decides what the caches hold.
            for name in ("attached", "bare") if index % 2 else ("bare", "attached"):
                took = timed(step) if name == "attached" else timed(lambda: work(plain))
                if index >= 4:
                    samples[name].append(took)
        memory.close()
    attached_ms, bare_ms = (line(f"two layers of 32/8/128: {name}", samples[name]) for name in ("attached", "bare"))
    ratio = statistics.median(a / b for a, b in zip(samples["attached"], samples["bare"], strict=True))
    assert bare_ms / LAYERS >= KERNEL_MS, f"a kernel takes {bare_ms / LAYERS:.1f} ms only: the ratio says little"
    return {
        "attached_over_bare": ratio,
        "attached_ms": attached_ms,
        "bare_ms": bare_ms,
        "attached_context": context,
    }
