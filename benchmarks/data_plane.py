"""The data plane over the wire: a compute service as a process of its own, an engine here, and a bare echo beside it.

    python benchmarks/data_plane.py [--quick]

JSON keys: `run_overhead_over_echo` (remote `run` of one decode layer through an arena, 9/3/64, batch 8, context 1024,
less the same kernel in this process, over an echo of messages of the same sizes on the same stack),
`attached_over_bare` (two kernels of 5 ms and more on the mapped pool with hold map, stamps and lease check, over the
same on plain tensors),
`plan_us_1024` and `plan_bytes_1024` (1,024 sequences × 64 blocks, 64 new grants), `inventory_seconds_1e6` (1,000,000
rows read from shared memory and validated) and `inventory_wire_seconds_1e6` (the same over the wire),
`inline_over_shm_1mib` (a run with 1 MiB of queries, keys and values in the message, over the same through an arena).

What is compared runs in turns, and figures are medians.
"""

import argparse
import asyncio
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Spinning OpenMP threads of torch would take the cores from whatever is measured next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import grpc
import numpy as np
import torch
from _data_plane_attached import attached
from _data_plane_rig import (
    BATCH,
    BLOCK_TOKENS,
    CONTEXT,
    DTYPE,
    ECHO,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    Stream,
    arena_of,
    place,
    plan_message,
    prefill,
    rows,
    serve_echo,
    service,
)
from _machine import describe_machine, finish, line

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from compute_attached import Attached
from compute_control import Blocks
from compute_engine import ATTEND, WRITE_AND_ATTEND, RemoteEngine, inline
from kvplane import kernels
from kvplane.kernels import PagedKv
from kvplane.kernels.cpu.warm_up import warm_up
from kvplane.v1 import compute_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire import directory, stamps
from kvplane.wire.options import channel_options


async def remote(folder: Path, echo_address: str, rounds: int) -> dict[str, float]:
    """Overhead of a remote run, and inline against arena."""
    per_sequence = CONTEXT // BLOCK_TOKENS
    changes = {
        "max_blocks": BATCH * per_sequence + 64,
        "num_layers": LAYERS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "kv_dtype": "bfloat16",
    }
    with service(folder / "remote", **changes) as (control, address):
        session = control.open_session()
        order = np.random.default_rng(0).permutation(np.arange(1, BATCH * per_sequence + 1)).reshape(BATCH, -1)
        tables: dict[int, tuple[int, Blocks]] = {
            sequence: (0, control.new_blocks(ids.tolist())) for sequence, ids in enumerate(order)
        }
        spare = control.new_blocks(list(range(BATCH * per_sequence + 1, BATCH * per_sequence + 64)))
        engine = RemoteEngine(address, session)
        engine.apply(control.grant(session, tables | {BATCH: (0, spare)}))
        prefill(engine, BATCH, CONTEXT - 1, KV_HEADS, HEAD_DIM, DTYPE, BATCH)
        engine.close()
        arena = arena_of(address, session, 8 << 20)
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stream = await Stream(ComputeServiceStub(channel).Execute()).open(session)
            overhead = await run_overhead(stream, arena, order, echo_address, rounds)
            inline_ratio = await inline_over_arena(stream, arena, max(5, rounds // 10))
        arena.close()
    return overhead | inline_ratio


async def run_overhead(
    stream: Stream, arena: Attached, order: np.ndarray, echo_address: str, rounds: int
) -> dict[str, float]:
    """Decode of one layer: through the service, in this process, and an echo of as many bytes.

    One plan is open and its first layer is run again and again with the same tensors, so that what is timed is the run
    alone: places, blocks and the kernel plan are remembered from the first one, and planning is `plans`' to time.
    """
    given = {"query": rows(BATCH, QUERY_HEADS), "key": rows(BATCH, KV_HEADS), "value": rows(BATCH, KV_HEADS)}
    tensors = place(arena, given | {"out": torch.zeros_like(given["query"])})
    await stream.request(plan=plan_message(1, dict.fromkeys(range(BATCH), (1, CONTEXT))))
    run = compute_pb2.Run(plan_id=1, layer=0, kind=WRITE_AND_ATTEND, tensors=tensors)
    blocks = (int(order.max()) + 1, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    layer = PagedKv.of(*(torch.randn(blocks).to(DTYPE) for _ in range(2)))
    batch = kernels.plan(layer.geometry, order, [CONTEXT] * BATCH, [1] * BATCH, num_query_heads=QUERY_HEADS)
    out = torch.empty_like(given["query"])

    def kernel() -> None:
        kernels.write(batch, given["key"], given["value"], layer)
        kernels.attend(batch, given["query"], layer, out=out)

    request = compute_pb2.ExecuteRequest(run=run)
    answer = await stream.again(request)
    request_bytes = request.ByteSize()
    samples: dict[str, list[float]] = {"run": [], "echo": [], "kernel": []}
    async with grpc.aio.insecure_channel(echo_address, options=channel_options()) as channel:
        echo = Stream(channel.stream_stream(ECHO)())
        await echo.ask(str(answer.ByteSize()).encode())
        message = bytes(request_bytes)
        shuffle = np.random.default_rng(0)
        for index in range(rounds + 20):
            # In another order every time: what runs before decides what the caches hold.
            took: dict[str, float] = {}
            for name in shuffle.permutation(("run", "echo", "kernel")).tolist():
                begin = time.perf_counter()
                if name == "run":
                    await stream.again(request)
                elif name == "echo":
                    await echo.ask(message)
                else:
                    kernel()
                took[name] = 1e3 * (time.perf_counter() - begin)
            if index >= 20:
                for name, milliseconds in took.items():
                    samples[name].append(milliseconds)
    await stream.request(close=compute_pb2.ClosePlan(plan_id=1))
    ran_ms, echo_ms, kernel_ms = (line(f"decode layer: {name}", samples[name]) for name in ("run", "echo", "kernel"))
    return {
        "run_overhead_over_echo": (ran_ms - kernel_ms) / echo_ms,
        "run_us": 1e3 * ran_ms,
        "echo_us": 1e3 * echo_ms,
        "kernel_us": 1e3 * kernel_ms,
    }


async def inline_over_arena(stream: Stream, arena: Attached, rounds: int) -> dict[str, float]:
    """The same run with its tensors in the message and in an arena."""
    tokens = (1 << 20) // ((QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM * DTYPE.itemsize)
    given = {"query": rows(tokens, QUERY_HEADS), "key": rows(tokens, KV_HEADS), "value": rows(tokens, KV_HEADS)}
    shared = place(arena, given | {"out": torch.zeros_like(given["query"])})
    await stream.request(plan=plan_message(2, {BATCH: (tokens, tokens)}))
    kinds = {"arena": shared, "inline": [inline(name, tensor) for name, tensor in given.items()]}
    samples: dict[str, list[float]] = {"arena": [], "inline": []}
    for index in range(rounds + 2):
        for name, tensors in kinds.items():
            run = compute_pb2.Run(plan_id=2, layer=0, kind=WRITE_AND_ATTEND, tensors=tensors)
            begin = time.perf_counter()
            await stream.request(run=run)
            if index >= 2:
                samples[name].append(1e3 * (time.perf_counter() - begin))
    arena_ms, inline_ms = (line(f"1 MiB of q, k and v: {name}", samples[name]) for name in ("arena", "inline"))
    return {"inline_over_shm_1mib": inline_ms / arena_ms, "shm_1mib_ms": arena_ms, "inline_1mib_ms": inline_ms}


async def plans(folder: Path, rounds: int) -> dict[str, float]:
    """A plan of 1,024 sequences of 64 blocks, with a new block for 64 of them, each in a grant of its own; the kernels'
    plan is made with it."""
    count, per_sequence, length = 1024, 64, 63 * BLOCK_TOKENS
    changes = {
        "max_blocks": count * per_sequence + 65,
        "num_layers": LAYERS,
        "num_kv_heads": 1,
        "head_dim": 16,
        "kv_dtype": "float16",
    }
    with service(folder / "plans", **changes) as (control, address):
        session = control.open_session()
        engine = RemoteEngine(address, session)
        for first in range(0, count, 256):
            tables = {
                sequence: (
                    0,
                    control.new_blocks(list(range(1 + sequence * per_sequence, 1 + (sequence + 1) * per_sequence))),
                )
                for sequence in range(first, first + 256)
            }
            engine.apply(control.grant(session, tables))
        prefill(engine, count, length, 1, 16, torch.float16, 128)
        engine.close()
        sequences = dict.fromkeys(range(count), (1, length + 1))
        samples, num_bytes = [], 0
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stream = await Stream(ComputeServiceStub(channel).Execute()).open(session)
            # A stream that has run something has its kernel plan made with the plan, which then is part of the figure.
            await stream.request(plan=plan_message(1, {0: (1, length)}))
            query = inline("query", rows(1, 1, 16, torch.float16))
            await stream.request(run=compute_pb2.Run(plan_id=1, layer=0, kind=ATTEND, tensors=[query]))
            await stream.request(close=compute_pb2.ClosePlan(plan_id=1))
            for index in range(rounds + 3):
                message = plan_message(index + 2, sequences)
                for sequence in range(64):
                    (block,) = control.new_blocks([count * per_sequence + 1 + sequence])
                    message.grants.append(control.grant(session, {sequence: (63, [block])}))
                num_bytes = compute_pb2.ExecuteRequest(request_id=1000, plan=message).ByteSize()
                begin = time.perf_counter()
                await stream.request(plan=message)
                if index >= 3:
                    samples.append(1e6 * (time.perf_counter() - begin))
                await stream.request(close=compute_pb2.ClosePlan(plan_id=index + 2))
    return {"plan_us_1024": line("plan of 1,024 sequences", samples, "us"), "plan_bytes_1024": num_bytes}


def inventory(folder: Path, rounds: int) -> dict[str, float]:
    """A million sealed rows: read and validated from shared memory, and over the wire."""
    num_blocks = 1_000_001
    changes = {
        "max_blocks": num_blocks,
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 16,
        "kv_dtype": "float16",
        "block_tokens": 1,
    }
    with service(folder / "inventory", **changes) as (control, _):
        files = Path(f"/dev/shm/{folder.name}-inventory") / "default-0"
        with (files / "directory").open("r+b") as file, (files / "stamps").open("r+b") as stamp_file:
            views = directory.open_directory(memoryview(mmap.mmap(file.fileno(), 0)))
            marks = stamps.open_stamps(memoryview(mmap.mmap(stamp_file.fileno(), 0)))
        content = np.zeros(num_blocks - 1, directory.BLOCK_ROW)
        content["generation"] = np.arange(1, num_blocks) + (1 << 32)
        content["filled"] = 1
        marks[1:] = content["generation"]
        directory.seal(views.blocks, np.arange(1, num_blocks), content)
        local, wire = [], []
        for index in range(rounds):
            begin = time.perf_counter()
            valid = directory.sealed_mask(views.blocks.copy(), marks.copy())
            local.append(time.perf_counter() - begin)
            assert int(valid.sum()) == num_blocks - 1
            begin = time.perf_counter()
            chunks = control.upload(index + 1, stamps=True)
            total = 0
            for chunk in chunks:
                found = np.frombuffer(chunk.rows, directory.BLOCK_ROW)
                total += int(directory.sealed_mask(found, np.frombuffer(chunk.stamps, "<u8")).sum())
            wire.append(time.perf_counter() - begin)
            assert total == num_blocks - 1
    return {
        "inventory_seconds_1e6": line("a million rows, shared memory", local, "s "),
        "inventory_wire_seconds_1e6": line("a million rows, over the wire", wire, "s "),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--echo", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo:
        asyncio.run(serve_echo(arguments.echo))
        return
    describe_machine()
    warm_up((DTYPE,))
    rounds = 100 if arguments.quick else 2000
    with tempfile.TemporaryDirectory(prefix="kvplane-bench-") as name:
        folder = Path(name)
        echo_address = f"unix:{folder / 'echo.sock'}"
        echo = subprocess.Popen(
            [sys.executable, __file__, "--echo", echo_address], stdin=subprocess.PIPE, env=dict(os.environ)
        )
        try:
            result = asyncio.run(remote(folder, echo_address, rounds))
        finally:
            echo.communicate()
        result |= attached(folder, max(20, rounds // 10))
        result |= asyncio.run(plans(folder, max(10, rounds // 20)))
        result |= inventory(folder, 2 if arguments.quick else 7)
    finish({name: round(value, 4) for name, value in result.items()})


if __name__ == "__main__":
    main()
