"""The `kvplane` command: its subcommands and their options."""

import os
from pathlib import Path
from typing import Annotated

import typer

from kvplane.cli import capacity, checks, console, options, plan, services, sizes, top, up
from kvplane.cli.model import ModelShape
from kvplane.cli.pair import SHARED_MEMORY
from kvplane.client import revisions
from kvplane.wire.addresses import cache_address, socket_path
from kvplane.wire.errors import InvalidArgumentError

app = typer.Typer(
    name="kvplane",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""The KV cache of an LLM server as a service: a control plane for blocks, a data plane for bytes.

- run both on this machine: `kvplane up --model DIR --memory 4GiB`
- see how far memory goes: `kvplane plan --model DIR --memory 16GiB --length 4096`
- find out what is wrong: `kvplane check`
- watch it: `kvplane top`

Engines and these commands find the cache service by KVPLANE_ADDRESS, or by the same default socket.
Exit status: 0 well, 1 failed, 2 wrong usage.""",
)

SERVICES, TOOLS = "Services", "Tools"
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

MEMORY = (
    "Memory for the block tensors of each compute service: 4GiB, 20GB, or a share of what /dev/shm has left for the "
    "whole pool: 50%."
)
MEMORY_FOLDER = Path(f"/dev/shm/kvplane-{os.getuid()}")
"""Where a compute service keeps its memory unless it is told otherwise."""

PoolId = Annotated[str | None, typer.Option(show_default="all pools", help="Pool to look at.")]


@app.command(context_settings=_PASS_THROUGH, add_help_option=False, rich_help_panel=SERVICES)
def cache(context: typer.Context) -> None:
    """Run the cache service (control plane). All arguments are its own: `kvplane cache --help`."""
    services.become("cache", context.args)


@app.command(context_settings=_PASS_THROUGH, add_help_option=False, rich_help_panel=SERVICES)
def compute(context: typer.Context) -> None:
    """Run a compute service (data plane). All arguments are its own: `kvplane compute --help`."""
    services.become("compute", context.args)


@app.command("demo", rich_help_panel=SERVICES)
def demo_command(
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, show_default="SmolLM2-135M-Instruct", help="Folder of a decoder model."
        ),
    ] = None,
) -> None:
    """See it work: a real model generates through both services.

    Two engine processes share a long system prompt; one is killed, a new one still hits; the cache service is killed
    and generation goes on. Every text is compared with plain transformers, token by token. Needs the extras [compute]
    and [transformers]. Leaves nothing behind, also when interrupted.
    """
    for name in ("cache", "compute"):
        services.require(name)
    from kvplane.cli.demo.main import main

    main(model)


@app.command("up", rich_help_panel=SERVICES)
def up_command(
    memory: Annotated[str, typer.Option(help=MEMORY)],
    model: options.Model = None,
    num_layers: options.NumLayers = None,
    num_kv_heads: options.NumKvHeads = None,
    head_dim: options.HeadDim = None,
    window_tokens: options.WindowTokens = None,
    weights_revision: options.WeightsRevision = None,
    tokenizer_revision: options.TokenizerRevision = None,
    kv_dtype: options.KvDtype = None,
    block_tokens: options.BlockTokens = 16,
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    address: options.Address = None,
    pool_id: Annotated[str, typer.Option(help="Name of the pool.")] = "default",
    memory_folder: Annotated[
        Path | None,
        typer.Option(
            show_default="a new one under /dev/shm, removed at the end",
            help="Keep the pool's memory in this folder, where the next start finds it again.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, show_default="one per CPU", help="Threads of each compute service.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, show_default="none", help="Port of the cache service's Prometheus endpoint."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show debug lines and every call.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no logs of the services.")] = False,
) -> None:
    """Run both services on this machine until Ctrl-C.

    Starts the cache service and as many compute services as the split asks for, waits until the pool is READY, and
    shows their logs. Ctrl-C or SIGTERM stops the compute services, then the cache service, and frees the pool's memory;
    nothing is left running, also when interrupted while starting.

    The revisions name what the cached bytes depend on. With --model they come from the hub's snapshot that the folder
    is, or else from the bytes of the files. Other settings of the services: KVPLANE_CACHE_… and KVPLANE_COMPUTE_…
    variables.
    """
    services.require("cache")
    services.require("compute")
    where = address or cache_address()
    if socket_path(where) is None:
        raise InvalidArgumentError.of(
            "address", f"{where} is TCP: `up` serves this machine on a Unix socket; see `kvplane cache --help` for TCP"
        )
    shape = options.model_shape(model, num_layers, num_kv_heads, head_dim, window_tokens)
    made = _plan(shape, memory, kv_dtype, block_tokens, tensor_parallel, pipeline_parallel, memory_folder)
    folder = model if model is not None and model.is_dir() else None
    if weights_revision is None:
        if folder is None:
            raise InvalidArgumentError.of("weights_revision", "give --weights-revision, or --model with a folder")
        weights_revision = up.weights_revision_of(folder)
    if tokenizer_revision is None:
        tokenizer_revision = revisions.tokenizer_revision(folder) if folder is not None else ""
    up.run(
        made,
        weights_revision,
        tokenizer_revision,
        address=where,
        pool_id=pool_id,
        memory_folder=memory_folder,
        threads=threads,
        metrics_port=metrics_port,
        verbose=verbose,
        quiet=quiet,
    )


@app.command("check", rich_help_panel=TOOLS)
def check_command(
    address: options.Address = None,
    tls_ca: options.TlsCa = None,
    tls_certificate: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
    pool_id: PoolId = None,
    model: options.Model = None,
    weights_revision: options.WeightsRevision = None,
    tokenizer_revision: options.TokenizerRevision = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Expected number format.", rich_help_panel=options.MODEL)] = None,
    block_tokens: Annotated[
        int | None, typer.Option(help="Expected tokens per block.", rich_help_panel=options.MODEL)
    ] = None,
    memory_folder: Annotated[
        Path,
        typer.Option(
            envvar="KVPLANE_COMPUTE_MEMORY_FOLDER",
            show_default="the compute service's default",
            help="Folder of the pool's memory, whose file system should have room.",
        ),
    ] = MEMORY_FOLDER,
    need: Annotated[str, typer.Option(help="Room that there should be, on this machine.")] = "64MiB",
) -> None:
    """Say whether the running services are healthy, and if not, why and what to do.

    One line per check: certificates, shared memory, cache service, pools, shards, model identity (as far as options say
    what is expected), limits. Exit status 0 when all are good, 1 otherwise.
    """
    where = options.connection(address, tls_ca, tls_certificate, tls_key)
    expected = checks.Expected(
        pool_id,
        None if model is None else options.model_shape(model, None, None, None, None),
        weights_revision,
        tokenizer_revision,
        kv_dtype,
        block_tokens,
    )
    good = True
    for finding in checks.examine(where, expected, memory_folder, sizes.parse_bytes(need, "need")):
        console.show_finding(finding.good, finding.check, finding.detail, finding.hint)
        good &= finding.good
    raise typer.Exit(0 if good else console.FAILED)


@app.command("top", rich_help_panel=TOOLS)
def top_command(
    address: options.Address = None,
    tls_ca: options.TlsCa = None,
    tls_certificate: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
    pool_id: PoolId = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            show_default="none",
            help="Prometheus endpoint of the cache service, for sessions and steps: http://127.0.0.1:9464/metrics",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame; also without a terminal.")] = False,
) -> None:
    """Watch pools: blocks by state, hit rate, sequences, evictions, preemptions. Ctrl-C ends it."""
    where = options.connection(address, tls_ca, tls_certificate, tls_key)
    if once or not console.out.is_terminal:
        top.show_once(where, pool_id, metrics, console.out)
        return
    try:
        top.show_live(where, pool_id, metrics, interval, console.out)
    except KeyboardInterrupt:
        return


@app.command("plan", rich_help_panel=TOOLS)
def plan_command(
    memory: Annotated[str, typer.Option(help=MEMORY)],
    model: options.Model = None,
    num_layers: options.NumLayers = None,
    num_kv_heads: options.NumKvHeads = None,
    head_dim: options.HeadDim = None,
    window_tokens: options.WindowTokens = None,
    weights_revision: options.WeightsRevision = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, show_default="1024 and 4096", help="Tokens of a sequence; may be given several times."),
    ] = None,
    kv_dtype: options.KvDtype = None,
    block_tokens: options.BlockTokens = 16,
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan capacity: from a model and a memory budget to bytes, blocks and sequences that fit.

    Prints the exact kvplane-compute flags too. Nothing is started, and no weights are read: where the revision cannot
    be seen from the folder's name it stands as REVISION.
    """
    shape = options.model_shape(model, num_layers, num_kv_heads, head_dim, window_tokens)
    made = _plan(shape, memory, kv_dtype, block_tokens, tensor_parallel, pipeline_parallel, None)
    seen = revisions.snapshot_revision(model) if model is not None else None
    show = plan.show_json if as_json else plan.show
    show(made, length or [1024, 4096], weights_revision or seen or "REVISION")


def _plan(
    shape: ModelShape,
    memory: str,
    kv_dtype: str | None,
    block_tokens: int,
    tensor_parallel: int,
    pipeline_parallel: int,
    memory_folder: Path | None,
) -> capacity.CapacityPlan:
    deployment = capacity.Deployment(
        options.stored_dtype(shape, kv_dtype), block_tokens, tensor_parallel, pipeline_parallel
    )
    if not memory.strip().endswith("%"):
        return capacity.plan(shape, deployment, sizes.parse_bytes(memory, "memory"))
    free = sizes.available_bytes(memory_folder or SHARED_MEMORY) // deployment.num_shards
    budget = sizes.parse_budget(memory, free, "memory")
    return capacity.plan(shape, deployment, capacity.pool_bytes_of_budget(shape, deployment, budget))
