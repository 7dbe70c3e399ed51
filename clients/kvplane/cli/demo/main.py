"""What `kvplane demo` does first: find the model, say what will happen, and which flags the compute service gets."""

from pathlib import Path

from kvplane.cli import console
from kvplane.cli.demo.run import POOL_BYTES, run
from kvplane.cli.model import read_model
from kvplane.client import revisions

DEFAULT_NAME = "SmolLM2-135M-Instruct"


def main(model: Path | None) -> None:
    """Run the demo. Raises `KvplaneError`."""
    console.out.print(
        "[bold]kvplane demo[/]: a real model generates through a cache service and a compute service.\n"
        "Nothing is downloaded from now on. About 1.5 minutes on 2 CPU cores, 2 GB of memory for each engine process, "
        f"{POOL_BYTES >> 20} MiB in /dev/shm.\n"
    )
    folder = model or _default_model()
    shape = read_model(folder)
    flags = {
        "--weights-revision": revisions.weights_revision(folder),
        "--tokenizer-revision": revisions.tokenizer_revision(folder),
        "--kv-dtype": "float32",
        "--num-layers": shape.num_layers,
        "--num-kv-heads": shape.num_kv_heads,
        "--head-dim": shape.head_dim,
        "--pool-bytes": POOL_BYTES,
    }
    run(
        str(folder),
        [str(part) for pair in flags.items() for part in pair],
        DEFAULT_NAME if model is None else str(model),
    )


def _default_model() -> Path:
    with console.err.status("preparing the model (once: about a minute)"):
        from kvplane.client.integrations.transformers import default_model

        return default_model()
