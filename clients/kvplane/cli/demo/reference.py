"""The truth of the demo: plain transformers, greedy, in a process of its own that knows nothing of kvplane's services.

`python -m kvplane.cli.demo.reference MODEL` (empty: SmolLM2-135M-Instruct)
"""

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvplane.cli.demo.lines import heard, say
from kvplane.client.integrations.transformers import default_model, load_tokenizer


def main() -> None:
    """Answer each `{"messages": …, "max_new_tokens": n}` with its prompt's token ids and the tokens that follow."""
    folder = sys.argv[1] or default_model(lambda text: say("progress", text=text))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.eval()
    tokenizer = load_tokenizer(folder)
    say("ready", folder=str(folder))
    for message in heard():
        encoded = tokenizer.apply_chat_template(
            message["messages"], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        prompt = encoded["input_ids"]
        started = time.perf_counter()
        with torch.inference_mode():
            answer = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=message["max_new_tokens"],
                pad_token_id=tokenizer.eos_token_id,
            )
        tokens = answer[0, prompt.shape[1] :].tolist()
        say("answer", prompt=prompt[0].tolist(), token_ids=tokens, seconds=time.perf_counter() - started)


if __name__ == "__main__":
    main()
