"""vLLM on the CPU as a peer: answers workloads on standard input, timed here.

    PEER/bin/python benchmarks/peers/vllm_cpu_generate.py MODEL_FOLDER THREADS

In: a JSON line {"prompts": [[token ids]], "outputs": [tokens]} each. Out: first {"version"}, then {"seconds"} a line.
Eager, bfloat16, prefix caching on as it comes, everything in one process so that nothing runs between workloads.
"""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM logs on standard output

folder, threads = sys.argv[1], sys.argv[2]
os.environ["OMP_NUM_THREADS"] = threads

import vllm


def say(**answer: object) -> None:
    """Write one line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


model = vllm.LLM(folder, dtype="bfloat16", enforce_eager=True, max_model_len=2048, max_num_seqs=256)
say(version=vllm.__version__)
for each in sys.stdin:
    work = json.loads(each)
    params = [
        vllm.SamplingParams(temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True)
        for count in work["outputs"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
    begin = time.perf_counter()
    model.generate(prompts, params, use_tqdm=False)
    say(seconds=time.perf_counter() - begin)
