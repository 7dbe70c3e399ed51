"""Token ids on the wire: build a message, serialize it, parse it into a numpy array.

JSON key `tokens_131072_ms`: median of all three together for 131,072 token ids, packed as `NewSequence.tokens`.
For comparison, the same ids through a `repeated uint32` field of this contract (`TensorSpec.shape`).
"""

import argparse
import time

import numpy as np
from _machine import describe_machine, finish, line

from kvplane.v1.cache_pb2 import StepRequest
from kvplane.v1.step_pb2 import Admit, NewSequence, Step
from kvplane.v1.types_pb2 import TensorSpec
from kvplane.wire.packed import pack_u32, pack_u64, unpack_u32

NUM_TOKENS = 131_072


def packed(tokens: np.ndarray, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds to build, serialize and parse, per round."""
    build, serialize, parse = [], [], []
    for _ in range(rounds):
        start = time.perf_counter()
        sequence = NewSequence(sequence_id=1 << 32, tokens=pack_u32(tokens))
        request = StepRequest(
            step=Step(step_id=1, admit=Admit(sequences=[sequence], order=pack_u64([1 << 32])))
        )  # fmt: skip
        built = time.perf_counter()
        wire = request.SerializeToString()
        serialized = time.perf_counter()
        received = StepRequest.FromString(wire)
        array = unpack_u32("tokens", received.step.admit.sequences[0].tokens)
        parsed = time.perf_counter()
        assert array.shape == tokens.shape
        assert array[-1] == tokens[-1]
        build.append(1e3 * (built - start))
        serialize.append(1e3 * (serialized - built))
        parse.append(1e3 * (parsed - serialized))
    return build, serialize, parse


def repeated(tokens: np.ndarray, rounds: int) -> list[float]:
    """Milliseconds for the same ids in a repeated field, all three steps together."""
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        wire = TensorSpec(shape=tokens).SerializeToString()
        array = np.array(TensorSpec.FromString(wire).shape, dtype=np.uint32)
        samples.append(1e3 * (time.perf_counter() - start))
        assert array[-1] == tokens[-1]
    return samples


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run of a second")
    rounds = 50 if parser.parse_args().quick else 1000
    describe_machine()
    tokens = np.random.default_rng(0).integers(0, 128_000, NUM_TOKENS, dtype=np.uint32)
    build, serialize, parse = packed(tokens, rounds)
    line("packed: build", build)
    line("packed: serialize", serialize)
    line("packed: parse to numpy", parse)
    total = line("packed: together", [sum(parts) for parts in zip(build, serialize, parse, strict=True)])
    slow = line("repeated uint32: together", repeated(tokens, max(5, rounds // 50)))
    finish({"tokens_131072_ms": round(total, 4), "repeated_over_packed": round(slow / total, 1)})


if __name__ == "__main__":
    main()
