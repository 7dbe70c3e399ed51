"""One engine of the demo, in a process of its own.

`python -m kvplane.cli.demo.engine NAME MODEL` (empty: SmolLM2-135M-Instruct), with `$KVPLANE_ADDRESS` set.
"""

import sys
import time

import torch

from kvplane.cli.demo.lines import heard, say
from kvplane.client.integrations.transformers import Engine, SamplingParams


def main() -> None:
    """Generate for each `{"prompt": ids, "max_new_tokens": n}`, telling every token as it comes."""
    name, folder = sys.argv[1:]
    started = time.perf_counter()
    with Engine.open(folder or None, dtype=torch.float32, name=f"demo engine {name}") as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))  # kernels are loaded with the first use
        say("ready", seconds=time.perf_counter() - started)
        for message in heard():
            output = None
            for event in engine.stream(message["prompt"], SamplingParams(max_new_tokens=message["max_new_tokens"])):
                say("tokens", token_ids=event.token_ids, time=time.monotonic())
                output = event.output or output
            assert output is not None
            metrics = output.metrics
            say(
                "done",
                token_ids=output.token_ids,
                text=output.text,
                prompt_tokens=metrics.prompt_tokens,
                cached_tokens=metrics.cached_tokens,
                hit_reason=metrics.hit_reason.name,
                first_token_seconds=metrics.first_token_seconds,
                total_seconds=metrics.total_seconds,
            )


if __name__ == "__main__":
    main()
