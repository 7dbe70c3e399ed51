"""One engine of the demo, in a process of its own.

`python -m kvplane.cli.demo.engine NAME MODEL` (empty: SmolLM2-135M-Instruct), with `$KVPLANE_ADDRESS` set.
"""

import sys
import time

import torch

from kvplane.cli.demo.lines import heard, say
from kvplane.client.integrations.transformers import Engine, Request, SamplingParams


def main() -> None:
    """Generate for each `{"prompt": ids, "max_new_tokens": n}`, telling every token as it comes."""
    name, folder = sys.argv[1:]
    started = time.perf_counter()
    with Engine.open(folder or None, dtype=torch.float32, name=f"demo engine {name}") as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))  # kernels are loaded with the first use
        say("ready", seconds=time.perf_counter() - started)
        for message in heard():
            engine.add(Request(message["prompt"], SamplingParams(max_new_tokens=message["max_new_tokens"]), name=name))
            while engine.unfinished:
                for event in engine.step():
                    say("tokens", token_ids=event.token_ids, text=event.text, time=time.monotonic())
                    if event.output is not None:
                        metrics = event.output.metrics
                        output = event.output
            engine.settle()
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
