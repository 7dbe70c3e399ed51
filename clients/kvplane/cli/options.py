"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from kvplane.cli.connection import Connection
from kvplane.cli.model import LayerGroup, ModelShape, read_model
from kvplane.wire.addresses import ADDRESS_VARIABLE, cache_address
from kvplane.wire.errors import InvalidArgumentError

CONNECTION = "Where the services are"
MODEL = "Model"
STORAGE = "Storage and split"

Address = Annotated[
    str | None,
    typer.Option(
        envvar=ADDRESS_VARIABLE,
        show_default="a socket in the runtime directory",
        help="Address of the cache service: unix:/path or host:port.",
        rich_help_panel=CONNECTION,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="PEM authorities of the services; given: TLS over TCP.", rich_help_panel=CONNECTION),
]
TlsCertificate = Annotated[
    Path | None, typer.Option(help="PEM certificate to show to the services.", rich_help_panel=CONNECTION)
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM key of that certificate.", rich_help_panel=CONNECTION)]

Model = Annotated[
    Path | None,
    typer.Option(help="Folder with the model's config.json, or that file.", rich_help_panel=MODEL),
]
NumLayers = Annotated[int | None, typer.Option(min=1, help="Layers, instead of --model.", rich_help_panel=MODEL)]
NumKvHeads = Annotated[int | None, typer.Option(min=1, help="KV heads over all shards.", rich_help_panel=MODEL)]
HeadDim = Annotated[int | None, typer.Option(min=1, help="Head dimension.", rich_help_panel=MODEL)]
WindowTokens = Annotated[
    int | None,
    typer.Option(min=1, show_default="full attention", help="Sliding window of all layers.", rich_help_panel=MODEL),
]
WeightsRevision = Annotated[str | None, typer.Option(help="Revision of the weights.", rich_help_panel=MODEL)]
TokenizerRevision = Annotated[str | None, typer.Option(help="Revision of the tokenizer.", rich_help_panel=MODEL)]

KvDtype = Annotated[
    str | None,
    typer.Option(
        show_default="the model's dtype",
        help="Number format of stored KV: bfloat16, float16 or float32.",
        rich_help_panel=STORAGE,
    ),
]
BlockTokens = Annotated[int, typer.Option(help="Tokens per block, a power of two.", rich_help_panel=STORAGE)]
TensorParallel = Annotated[
    int, typer.Option(min=1, help="Compute services that share each layer's heads.", rich_help_panel=STORAGE)
]
PipelineParallel = Annotated[
    int, typer.Option(min=1, help="Compute services that share the layers.", rich_help_panel=STORAGE)
]


def connection(
    address: str | None, tls_ca: Path | None, tls_certificate: Path | None, tls_key: Path | None
) -> Connection:
    """The connection that the options describe. Raises `InvalidArgumentError`."""
    made = Connection(address or cache_address(), tls_ca, tls_certificate, tls_key)
    made.check()
    return made


def model_shape(
    model: Path | None, num_layers: int | None, num_kv_heads: int | None, head_dim: int | None, window: int | None
) -> ModelShape:
    """The shape of --model, or of the flags. Raises `InvalidArgumentError` when it is neither one nor the other."""
    flags = {"--num-layers": num_layers, "--num-kv-heads": num_kv_heads, "--head-dim": head_dim}
    if model is not None:
        given = [name for name, value in {**flags, "--window-tokens": window}.items() if value is not None]
        if given:
            raise InvalidArgumentError.of("model", f"--model has a config.json already: leave {given[0]} out")
        return read_model(model)
    if num_layers is None or num_kv_heads is None or head_dim is None:
        missing = [name for name, value in flags.items() if value is None]
        raise InvalidArgumentError.of("model", f"give --model FOLDER, or the shape: {', '.join(missing)} missing")
    return ModelShape((LayerGroup(num_layers, window),), num_kv_heads, head_dim, None)


def stored_dtype(shape: ModelShape, kv_dtype: str | None) -> str:
    """The format to store. Raises `InvalidArgumentError` when neither option nor model says one."""
    found = kv_dtype or shape.dtype
    if found is None or found == "auto":
        raise InvalidArgumentError.of("kv_dtype", "the model does not say its dtype: give --kv-dtype")
    return found
