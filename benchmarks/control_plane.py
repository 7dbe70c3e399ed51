"""The control plane over the wire: decode steps against a bare echo of the same bytes and against vLLM in process.

Server, shard and client are processes of their own. The client's build and numpy parsing are inside the timer.

JSON keys: `rtt_over_echo_N` and `p99_over_echo_p99_1024` (round trip of a decode step of N running sequences over an
echo of the same bytes), `vllm_step_over_rtt_N` (vLLM's schedule + update_from_output over our round trip; left out
without the peer), `exposed_share`, `exposed_us`, `client_cpu_us` (what a step that is sent while the one before
computes adds to it, N = 256),
`seq_steps_per_second` (8 sessions × 64 sequences, per second of CPU of the server's event loop thread),
`p99_during_long_admission_over_p50` (N = 64 while another session admits 131,072 tokens again and again);
`recovery_seconds`, `blocks_kept` (of `blocks_sealed`), `wrong_tables` (from kill -9 of the service until it is open
again, with 1,000 running sequences whose sessions declare them and 100,000 published blocks; its start as a process
included).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import _recovery as recovery
import grpc
import numpy as np
from _control_client import BLOCK_TOKENS, POOL, Engine, settle
from _machine import describe_machine, finish, line, p99
from _recovery import wait_for_pool

from kvplane.v1 import step_pb2
from kvplane.wire.options import channel_options
from kvplane.wire.packed import pack_u32, pack_u64

HERE = Path(__file__).parent
NUM_BLOCKS = 200_000


@contextmanager
def processes(folder: str) -> Iterator[tuple[str, str, int]]:
    """A cache service, a shard and an echo server; yields both addresses and the service's process id."""
    cache, echo = f"unix:{folder}/cache.sock", f"unix:{folder}/echo.sock"
    shard = HERE.parent / "tests" / "tensorless_shard.py"
    service = [
        sys.executable,
        "-m",
        "kvplane.cache",
        "--listen",
        cache,
        "--metrics-address",
        "",
        "--log-level",
        "error",
    ]
    running = [
        subprocess.Popen(service),
        subprocess.Popen([sys.executable, str(HERE / "_echo_server.py"), echo], stdin=subprocess.PIPE),
        subprocess.Popen(
            [sys.executable, str(shard), cache, POOL, str(NUM_BLOCKS), str(BLOCK_TOKENS)], stdin=subprocess.PIPE
        ),
    ]
    try:
        yield cache, echo, running[0].pid
    finally:
        for process in reversed(running):
            if process.stdin:
                process.stdin.close()
            process.terminate()
            process.wait(20)


async def round_trips(engine: Engine, steps: int) -> list[float]:
    """Milliseconds of each decode step."""
    samples = []
    for _ in range(steps):
        start = time.perf_counter()
        await engine.decode()
        samples.append(1e3 * (time.perf_counter() - start))
    return samples


async def echoes(address: str, request: bytes, answer: bytes, steps: int) -> list[float]:
    """Milliseconds of each echo of the same bytes."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/kvplane.benchmark.Echo/Echo")
        stream = call()
        await stream.write(str(len(answer)).encode())
        samples = []
        for _ in range(steps):
            start = time.perf_counter()
            await stream.write(request)
            await stream.read()
            samples.append(1e3 * (time.perf_counter() - start))
        stream.cancel()
    return samples


async def against_echo(cache: str, echo: str, num_sequences: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Interleaved rounds of decode steps and echoes."""
    engine = Engine(cache, num_sequences, seed=num_sequences)
    await engine.start()
    await settle()
    request, answer = await engine.sample()
    found: dict[str, list[float]] = {"step": [], "echo": []}
    await round_trips(engine, 20)
    await echoes(echo, request, answer, 20)
    for _ in range(rounds):
        found["step"] += await round_trips(engine, steps)
        found["echo"] += await echoes(echo, request, answer, steps)
    await engine.stop()
    print(f"N = {num_sequences}: request {len(request)} B, answer {len(answer)} B")
    return found


async def pipelined(cache: str, steps: int, compute_seconds: float = 0.005) -> tuple[list[float], list[float], float]:
    """Milliseconds of a computation with a control step beside it, and of the same computation alone, in turn; and the
    client's own CPU microseconds per step. Step t is launched; while it computes, step t + 1 is built, sent, answered
    and parsed."""
    engine = Engine(cache, 256, seed=3)
    await engine.start()
    await settle()
    loop = asyncio.get_running_loop()
    beside, alone, cpu = [], [], 0.0
    await engine.decode()
    for _ in range(steps):
        start, used = time.perf_counter(), time.thread_time()
        computing = loop.run_in_executor(None, _busy_wait, compute_seconds)
        await engine.decode()
        await computing
        beside.append(1e3 * (time.perf_counter() - start))
        cpu += time.thread_time() - used
        start = time.perf_counter()
        await loop.run_in_executor(None, _busy_wait, compute_seconds)
        alone.append(1e3 * (time.perf_counter() - start))
    await engine.stop()
    return beside, alone, 1e6 * cpu / steps


def _busy_wait(seconds: float) -> None:
    """Compute without the GIL: a long numpy product in slices."""
    until = time.perf_counter() + seconds
    matrix = np.ones((96, 96), np.float32)
    while time.perf_counter() < until:
        np.dot(matrix, matrix)


def event_loop_seconds(pid: int) -> float:
    """CPU seconds of a process's first thread, which runs its event loop."""
    fields = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


async def throughput(cache: str, pid: int, seconds: float) -> float:
    """Sequence steps per second of the server's event loop CPU: 8 sessions of 64 sequences at once."""
    engines = [Engine(cache, 64, seed=100 + number) for number in range(8)]
    for engine in engines:
        await engine.start()
    await settle()
    until = time.perf_counter() + seconds

    async def drive(engine: Engine) -> int:
        count = 0
        while time.perf_counter() < until:
            await engine.decode()
            count += 64
        return count

    before = event_loop_seconds(pid)
    done = sum(await asyncio.gather(*(drive(engine) for engine in engines)))
    used = event_loop_seconds(pid) - before
    for engine in engines:
        await engine.stop()
    return done / used


async def beside_long_admissions(cache: str, steps: int) -> tuple[list[float], int]:
    """Milliseconds of decode steps (N = 64) while another session admits 131,072 tokens again and again."""
    engine = Engine(cache, 64, seed=7)
    await engine.start()
    await settle()
    stop, admitted = threading.Event(), [0]
    other = threading.Thread(target=_admit_long_prompts, args=(cache, stop, admitted))
    other.start()
    while not admitted[0]:
        if not other.is_alive():
            raise RuntimeError("the session that admits long prompts ended")
        await asyncio.sleep(0.01)
    samples: list[float] = []
    while len(samples) < steps:
        samples += await round_trips(engine, 1)
        await asyncio.sleep(0.002)
    stop.set()
    other.join()
    await engine.stop()
    return samples, admitted[0]


def _admit_long_prompts(cache: str, stop: threading.Event, admitted: list[int]) -> None:
    command = [sys.executable, __file__, "--admit-long", cache]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in process.stdout:
            admitted[0] += 1
            if stop.is_set():
                process.terminate()
                return


async def admit_long(cache: str) -> None:
    """Admit a new prompt of 131,072 tokens, finish it, print a line; until ended."""
    engine = Engine(cache, 0)
    await engine.start()
    # One prompt, made once: another first token makes it another prompt, and drawing 131,072 numbers each time would
    # measure the client that competes for the same cores.
    tokens = np.random.default_rng(11).integers(0, 128_000, 131_072, dtype=np.uint32)
    for serial in range(1, 1 << 20):
        sequence_id = serial << 32
        tokens[0] = serial
        new = step_pb2.NewSequence(sequence_id=sequence_id, tokens=pack_u32(tokens))
        await engine.exchange(step_pb2.Step(admit=step_pb2.Admit(sequences=[new], order=pack_u64([sequence_id]))))
        finish_it = step_pb2.Finish(
            sequence_ids=pack_u64([sequence_id]), reasons=pack_u32([step_pb2.FINISH_REASON_ABORT])
        )
        await engine.exchange(step_pb2.Step(finish=finish_it))
        print(serial, flush=True)


async def measure(quick: bool, cache: str, echo: str, pid: int) -> dict[str, float]:
    """All figures of one run."""
    rounds, steps = (2, 40) if quick else (8, 150)
    result: dict[str, float] = {}
    for num_sequences in (64, 1024):
        found = await against_echo(cache, echo, num_sequences, rounds, steps)
        ours = line(f"decode step, N = {num_sequences}", found["step"])
        bare = line(f"echo of the same bytes, N = {num_sequences}", found["echo"])
        result[f"rtt_ms_{num_sequences}"] = round(ours, 4)
        result[f"rtt_over_echo_{num_sequences}"] = round(ours / bare, 3)
        if num_sequences == 1024:
            result["p99_over_echo_p99_1024"] = round(p99(found["step"]) / p99(found["echo"]), 3)
    beside, alone, cpu = await pipelined(cache, 40 if quick else 400)
    exposed = line("5 ms of computing beside a step, N = 256", beside) - line("the same alone", alone)
    result |= {
        "exposed_share": round(exposed / 5, 4),
        "exposed_us": round(1e3 * exposed, 1),
        "client_cpu_us": round(cpu, 1),
    }
    result["seq_steps_per_second"] = round(await throughput(cache, pid, 1 if quick else 5))
    print(f"sequence steps per second of event loop CPU: {result['seq_steps_per_second']}")
    samples, prompts = await beside_long_admissions(cache, 60 if quick else 600)
    line(f"decode step, N = 64, beside {prompts} long admissions", samples)
    result["p99_during_long_admission_over_p50"] = round(p99(samples) / result["rtt_ms_64"], 3)
    result["p99_during_long_admission_over_own_p50"] = round(p99(samples) / statistics.median(samples), 3)
    return result


def against_vllm(quick: bool, result: dict[str, float]) -> None:
    """Add vLLM's in-process control step, measured in its own environment, when that is there."""
    python = os.environ.get("KVPLANE_PEER_VLLM") or str(HERE.parent / ".envs" / "peer-vllm" / "bin" / "python")
    if not Path(python).exists():
        print("peer: no vLLM environment (make bench-peers); its keys are left out")
        return
    command = [python, str(HERE / "peers" / "vllm_scheduler.py"), "16" if quick else "96", "64", "1024"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found = json.loads(done.stdout)
    print(f"peer: vLLM {found['version']}")
    for count in ("64", "1024"):
        control = line(f"vLLM schedule + update_from_output, N = {count}", found[count]["control"])
        kv = line(f"vLLM allocate + hash alone, N = {count}", found[count]["kv"])
        result[f"vllm_step_over_rtt_{count}"] = round(control / result[f"rtt_ms_{count}"], 3)
        result[f"vllm_kv_over_rtt_{count}"] = round(kv / result[f"rtt_ms_{count}"], 3)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--admit-long", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.admit_long:
        asyncio.run(admit_long(arguments.admit_long))
        return
    describe_machine()
    with tempfile.TemporaryDirectory(prefix="kvplane-") as folder, processes(folder) as (cache, echo, pid):
        wait_for_pool(cache)
        result = asyncio.run(measure(arguments.quick, cache, echo, pid))
    with tempfile.TemporaryDirectory(prefix="kvplane-") as folder:
        result |= recovery.measure(folder, arguments.quick)
    against_vllm(arguments.quick, result)
    finish(result)


if __name__ == "__main__":
    main()
