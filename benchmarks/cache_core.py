"""The cache core against vLLM's own block manager in one run: decode, admission, eviction, memory.

    python benchmarks/cache_core.py [--quick]

vLLM's side runs in an environment of its own (`make bench-peers`; `KVPLANE_PEER_VLLM` names another
interpreter), interleaved with ours round by round, so that both meet the same machine. Without it, its keys
are left out. All times are CPU time of the thread, so other processes cost cache lines but no time; medians
are over all samples of all rounds. The last line is one JSON object.

What is timed is what replaces what: our decode step observes, commits, hashes, hands out the seals of the
blocks that filled, publishes those of the step before and extends tables; vLLM's appends tokens (which
hashes) and allocates (which publishes). Admission is hash + lookup + allocate on both sides; ours is timed
once more with the publication that vLLM does inside it (`admit_cold_published_us_2048`). `evict` is the
allocation alone on our side, hashed before on both; `evict_published_us_128` has the publication in it.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from _machine import describe_machine, finish, p99

from kvplane.cache.core import Admit, Advance, CacheCore, CoreConfig, Finish, Lengths, Step
from kvplane.cache.core.arrays import U32, U64
from kvplane.wire.identity import ModelIdentity

BLOCK = 16
VOCABULARY = 128_000
DECODE_SIZES = (64, 256, 1024)
PEER = Path(__file__).with_name("peers") / "vllm_blocks.py"

now = time.thread_time_ns


class Engine:
    """The least an engine does: number steps, confirm answers, and let seals be acknowledged a step later."""

    def __init__(self, num_blocks: int, max_sequences: int, **options: object) -> None:
        model = ModelIdentity("weights", "tokenizer", "bfloat16", BLOCK)
        config = CoreConfig(num_blocks=num_blocks, model=model, watermark=0.0, **options)  # type: ignore[arg-type]
        self.core = CacheCore(config)
        self.session_id = self.core.open_session(0.0, max_sequences=max_sequences).session_id
        self.step_id = 0

    def step(self, **operations: object) -> int:
        """CPU nanoseconds of one step; building its arrays is the wire's work and not timed."""
        self.step_id += 1
        done = self.step_id - 1
        step = Step(self.step_id, last_seen_step=done, completed_step=done, **operations)  # type: ignore[arg-type]
        start = now()
        self.core.step(self.session_id, step, 0.0)
        return now() - start

    def settle(self) -> int:
        """CPU nanoseconds to hand out all seals and publish them."""
        start = now()
        batch = self.core.take_seals()
        if batch is not None:
            self.core.acknowledge_seals(batch.seal_id)
        self.core.settle()
        return now() - start


def ids(rows: int, serial: int = 1) -> U64:
    """Sequence ids of the first rows."""
    return (np.uint64(serial) << np.uint64(32)) + np.arange(rows, dtype=np.uint64)


def random_tokens(count: int, seed: int) -> U32:
    """Token ids."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.uint32)


def decode(rows: int, steps: int, seed: int) -> list[int]:
    """CPU nanoseconds per step of `rows` sequences that each get one token; staggered block boundaries."""
    lengths = 256 + np.random.default_rng(seed).integers(0, 256, rows)
    engine = Engine(rows * (512 // BLOCK + steps // BLOCK + 4) + 8, rows)
    sequences = ids(rows)
    prompts = [random_tokens(int(length), seed + row).tobytes() for row, length in enumerate(lengths)]
    engine.step(admit=tuple(Admit(int(each), prompt) for each, prompt in zip(sequences, prompts, strict=True)))
    engine.step(commit=Lengths(sequences, lengths.astype(np.uint32)))
    engine.settle()
    samples, under_way = [], None
    gc.collect()
    for index in range(steps):
        advance = Advance(
            sequences.copy(),
            np.full(rows, index * 7919 % VOCABULARY, np.uint32),
            lengths.astype(np.uint32),
            (lengths + 1).astype(np.uint32),
        )
        engine.step_id += 1
        done = engine.step_id - 1
        step = Step(engine.step_id, last_seen_step=done, completed_step=done, advance=advance)
        start = now()
        if under_way is not None:
            engine.core.acknowledge_seals(under_way.seal_id)
        engine.core.step(engine.session_id, step, 0.0)
        under_way = engine.core.take_seals()
        samples.append(now() - start)
        lengths = lengths + 1
    engine.core.check_integrity()
    return samples


def admit_cold(tokens: int, runs: int, seed: int) -> tuple[list[int], list[int]]:
    """CPU nanoseconds to admit a prompt that nobody has seen: without and with its publication."""
    admitted, published = [], []
    for run in range(runs):
        engine = Engine(tokens // BLOCK * 2 + 64, 4, max_new_blocks_per_sequence=1 << 16)
        prompt = random_tokens(tokens, seed + run).tobytes()
        gc.collect()
        took = engine.step(admit=(Admit(1 << 32, prompt),))
        admitted.append(took)
        took += engine.step(commit=Lengths(ids(1), np.array([tokens], np.uint32)))
        published.append(took + engine.settle())
    return admitted, published


def admit_warm(tokens: int, runs: int, seed: int) -> list[int]:
    """CPU nanoseconds to admit a prompt whose blocks are all cached, and one block more."""
    samples = []
    engine = Engine(tokens // BLOCK * 2 + 64, 4, max_new_blocks_per_sequence=1 << 16)
    prompt = random_tokens(tokens, seed)
    engine.step(admit=(Admit(1 << 32, prompt.tobytes()),))
    engine.step(commit=Lengths(ids(1), np.array([tokens], np.uint32)))
    engine.settle()
    for run in range(runs):
        longer = np.concatenate([prompt, random_tokens(BLOCK, seed + run + 1)]).tobytes()
        sequence = (run + 1) << 32 | 1
        gc.collect()
        samples.append(engine.step(admit=(Admit(sequence, longer),)))
        assert engine.core.statistics().hit_tokens == tokens * (run + 1)
        finish = Finish(np.array([sequence], np.uint64), np.ones(1, np.uint32))
        engine.step(finish=finish)
    return samples


def evict(runs: int, seed: int) -> tuple[list[int], list[int]]:
    """CPU nanoseconds to allocate 2,048 hashed tokens in a pool full of cached blocks: 128 evictions.

    The second list has the publication of the 128 blocks in it.
    """
    prompts, tokens = 64, 2048
    engine = Engine(prompts * tokens // BLOCK + 1, 4)
    allocated, published = [], []
    gc.collect()
    for run in range(prompts + runs):
        sequence = np.array([(run + 1) << 32], np.uint64)
        prompt = random_tokens(tokens, seed + run).tobytes()
        chain = engine.core.hash_prompt(0, prompt)
        took = engine.step(admit=(Admit(int(sequence[0]), prompt, chain=chain),))
        both = took + engine.step(commit=Lengths(sequence, np.array([tokens], np.uint32))) + engine.settle()
        if run >= prompts:
            allocated.append(took)
            published.append(both)
        engine.step(finish=Finish(sequence, np.ones(1, np.uint32)))
    assert engine.core.statistics().evicted_blocks == runs * tokens // BLOCK
    return allocated, published


def memory(num_blocks: int) -> dict[str, float]:
    """Resident bytes a block and CPU seconds to build a pool of cached blocks, in a fresh process."""
    code = f"import cache_core; cache_core.memory_child({num_blocks})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    result: dict[str, float] = json.loads(out.stdout)
    return result


def memory_child(num_blocks: int) -> None:
    """Chains of 128 random digests, as a restart finds them in a directory."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    count = num_blocks - 1
    block_ids = np.arange(1, num_blocks, dtype=np.uint32)
    digests = np.random.default_rng(0).integers(0, 256, (count, 32), dtype=np.uint8)
    depths = ((block_ids - 1) % 128).astype(np.uint32)
    parents = np.roll(digests, 1, axis=0)
    generations, spaces = np.full(count, 1 << 32, np.uint64), np.zeros(count, np.uint32)
    model = ModelIdentity("weights", "tokenizer", "bfloat16", BLOCK)
    gc.collect()
    before = resident()
    start = now()
    core = CacheCore(CoreConfig(num_blocks=num_blocks, model=model, incarnation=2))
    kept = core.restore(block_ids, generations, digests, parents, depths, spaces)
    seconds = (now() - start) / 1e9
    gc.collect()
    assert kept == count
    assert core.statistics().cached == count
    print(json.dumps({"bytes_per_block": (resident() - before) / num_blocks, "build_seconds": seconds}))


def peer_python() -> str | None:
    """Interpreter of vLLM's environment."""
    path = os.environ.get("KVPLANE_PEER_VLLM") or str(
        Path(__file__).parents[1] / ".envs" / "peer-vllm" / "bin" / "python"
    )
    return path if Path(path).exists() else None


class Peer:
    """vLLM's side, a process that measures one thing per line it reads."""

    def __init__(self, python: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [python, str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.versions = self._read()

    def measure(self, name: str, *arguments: int) -> list[int]:
        """CPU nanoseconds, one sample an entry."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        samples: list[int] = self._read()["samples"]
        return samples

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _read(self) -> dict[str, list[int]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # whatever else a library prints is no answer
                answer: dict[str, list[int]] = json.loads(line)
                return answer
        raise RuntimeError("the peer ended; its message is above")


def main() -> None:
    """Run everything, print a table, and one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for continuous integration")
    quick = parser.parse_args().quick
    rounds, steps, runs = (1, 48, 5) if quick else (5, 160, 15)
    ours: defaultdict[str, list[int]] = defaultdict(list)
    theirs: defaultdict[str, list[int]] = defaultdict(list)
    describe_machine()
    python = peer_python()
    peer = Peer(python) if python else None
    print(f"peer: {peer.versions}" if peer else "peer: no vLLM environment (make bench-peers); its keys are left out")
    gc.collect()
    gc.freeze()  # as a service does after start-up, and vLLM's engine core too

    for turn in range(rounds):
        seed = 1000 * turn
        for rows in DECODE_SIZES:
            ours[f"decode_{rows}"] += decode(rows, steps, turn)
            theirs[f"decode_{rows}"] += peer.measure("decode", rows, steps, turn) if peer else []
        cold, published = admit_cold(2048, runs, seed)
        ours["admit_cold_2048"] += cold
        ours["admit_cold_published_2048"] += published
        theirs["admit_cold_2048"] += peer.measure("admit_cold", 2048, runs, seed) if peer else []
        warm = max(1, runs // 5)
        ours["admit_warm_131072"] += admit_warm(131072, warm, seed)
        theirs["admit_warm_131072"] += peer.measure("admit_warm", 131072, warm, seed) if peer else []
        allocated, published = evict(4 * runs, seed)
        ours["evict_128"] += allocated
        ours["evict_published_128"] += published
        theirs["evict_128"] += peer.measure("evict", 4 * runs, seed) if peer else []
    if peer is not None:
        peer.close()

    report: dict[str, float] = {}
    for key, samples in ours.items():
        median, high = statistics.median(samples) / 1e3, p99(samples) / 1e3
        line = f"{key:28s} kvplane {median:10.1f} µs  p99 {high:10.1f}"
        name, size = key.rsplit("_", 1)
        report[f"{name}_us_{size}"] = round(median, 1)
        cost = median
        if name == "decode":
            # Publication is caught up with every few steps: only the mean has all of it, so the mean counts
            # against vLLM, whose median has it in every step.
            cost = statistics.fmean(samples) / 1e3
            report[f"decode_mean_us_{size}"] = round(cost, 1)
            line += f"  mean {cost:10.1f}"
        if theirs[key]:
            other = statistics.median(theirs[key]) / 1e3
            high = p99(theirs[key]) / 1e3
            line += f"   vLLM {other:10.1f} µs  p99 {high:10.1f}   ratio {other / cost:6.2f}"
            report[f"{name}_ratio_{size}"] = round(other / cost, 2)
        print(line)
    report["decode_p99_over_median"] = round(p99(ours["decode_1024"]) / statistics.median(ours["decode_1024"]), 2)
    pool = [memory(100_000 if quick else 1_000_000) for _ in range(1 if quick else 3)]
    report["bytes_per_block"] = round(statistics.median(each["bytes_per_block"] for each in pool), 1)
    report["build_seconds"] = round(statistics.median(each["build_seconds"] for each in pool), 3)
    finish(report)


if __name__ == "__main__":
    main()
