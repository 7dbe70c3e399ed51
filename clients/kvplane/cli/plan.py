"""`kvplane plan`: the planner's answer as tables, as JSON, and as the flags that make it so."""

import json
from dataclasses import asdict
from typing import Any

from rich.table import Table

from kvplane.cli import console
from kvplane.cli.capacity import CapacityPlan, group_token_bytes, sequence_blocks, unused_share
from kvplane.cli.sizes import format_bytes


def as_dict(plan: CapacityPlan, lengths: list[int], weights_revision: str) -> dict[str, Any]:
    """Everything that the tables say."""
    return {
        **asdict(plan),
        "shards": [asdict(shard) | {"total_bytes": shard.total_bytes} for shard in plan.shards],
        "token_bytes": plan.token_bytes,
        "block_bytes": plan.block_bytes,
        "num_tokens": plan.num_tokens,
        "max_unused_slots": plan.max_unused_slots,
        "sequences": [asdict(plan.sequence(length)) for length in lengths],
        "commands": [["kvplane-compute", *compute_flags(plan, weights_revision, rank)] for rank in _ranks(plan)],
    }


def compute_flags(plan: CapacityPlan, weights_revision: str, rank: int | None = None) -> list[str]:
    """Flags of a compute service of this pool; without --rank when none is given."""
    shape, deployment = plan.shape, plan.deployment
    flags = [
        *("--weights-revision", weights_revision),
        *("--num-layers", str(shape.num_layers), "--num-kv-heads", str(shape.num_kv_heads)),
        *("--head-dim", str(shape.head_dim), "--kv-dtype", deployment.kv_dtype),
        *("--block-tokens", str(deployment.block_tokens), "--pool-bytes", str(plan.pool_bytes)),
    ]
    if shape.window_tokens is not None:
        flags += ["--window-tokens", str(shape.window_tokens)]
    for name, value in (
        ("--tensor-parallel", deployment.tensor_parallel),
        ("--pipeline-parallel", deployment.pipeline_parallel),
    ):
        flags += [name, str(value)] if value > 1 else []
    return flags if rank is None or deployment.num_shards == 1 else [*flags, "--rank", str(rank)]


def show_json(plan: CapacityPlan, lengths: list[int], weights_revision: str) -> None:
    """One JSON object on standard output."""
    print(json.dumps(as_dict(plan, lengths, weights_revision), indent=2))


def show(plan: CapacityPlan, lengths: list[int], weights_revision: str) -> None:
    """Tables on standard output, then one command per shard."""
    console.out.print(_pool_table(plan))
    if len(plan.shape.groups) > 1:
        console.out.print(_groups_table(plan, max(lengths)))
        console.out.print(
            "Layers of several kinds in one pool are not built: this pool stores all of them in full.", style="yellow"
        )
    if plan.deployment.num_shards > 1:
        console.out.print(_shards_table(plan))
    console.out.print(_sequences_table(plan, lengths))
    console.out.print("Start it:")
    for rank in _ranks(plan):
        # Not through the console: a wrapped line could not be copied.
        print("  kvplane-compute " + " ".join(compute_flags(plan, weights_revision, rank)))


def _ranks(plan: CapacityPlan) -> range:
    return range(plan.deployment.num_shards)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _pool_table(plan: CapacityPlan) -> Table:
    shape, deployment = plan.shape, plan.deployment
    table = _table("Pool", "what", "value")
    first = plan.shards[0]
    attention = "full attention" if shape.window_tokens is None else f"window of {shape.window_tokens:,}"
    rows = {
        "model": f"{shape.num_layers} layers × {shape.num_kv_heads} KV heads × {shape.head_dim}, {attention}",
        "stored as": f"{deployment.kv_dtype}, blocks of {deployment.block_tokens} tokens",
        "one token": format_bytes(plan.token_bytes),
        "one block": format_bytes(plan.block_bytes) + (" over all shards" if deployment.num_shards > 1 else ""),
        "budget for block tensors": f"{format_bytes(plan.pool_bytes)}{_per_shard(plan)}",
        "blocks": f"{plan.num_blocks:,} (one is the null block)",
        "tokens": f"{plan.num_tokens:,}",
        "directory and stamps": f"{format_bytes(first.bookkeeping_bytes)}{_per_shard(plan)}",
        "shared memory": f"{format_bytes(max(shard.total_bytes for shard in plan.shards))}{_per_shard(plan)}",
        "unused slots of a sequence": f"at most {plan.max_unused_slots}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _per_shard(plan: CapacityPlan) -> str:
    return " a shard" if plan.deployment.num_shards > 1 else ""


def _groups_table(plan: CapacityPlan, length: int) -> Table:
    table = _table("Kinds of layers", "kind", "layers", "one token", f"{length:,} tokens need")
    for group in plan.shape.groups:
        size, one = plan.deployment.block_tokens, group_token_bytes(plan.shape, group, plan.deployment.kv_dtype)
        needed = sequence_blocks(length, size, group.window_tokens) * size * one
        kind = "full attention" if group.window_tokens is None else f"window of {group.window_tokens:,}"
        table.add_row(kind, str(group.num_layers), format_bytes(one), format_bytes(needed))
    return table


def _shards_table(plan: CapacityPlan) -> Table:
    table = _table("Shards", "rank", "layers", "KV heads", "one block", "shared memory")
    for shard in plan.shards:
        table.add_row(
            str(shard.rank),
            _span(shard.first_layer, shard.num_layers),
            _span(shard.first_kv_head, shard.num_kv_heads) + (" (replicated)" if shard.replicated else ""),
            format_bytes(shard.block_bytes),
            format_bytes(shard.total_bytes),
        )
    return table


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}–{first + count - 1}"


def _sequences_table(plan: CapacityPlan, lengths: list[int]) -> Table:
    table = _table("Sequences", "tokens", "blocks", "bytes", "unused slots", "unused share", "fit side by side")
    for length in lengths:
        sequence = plan.sequence(length)
        slots = length + sequence.unused_slots
        table.add_row(
            f"{length:,}",
            f"{sequence.num_blocks:,}",
            format_bytes(sequence.num_bytes),
            str(sequence.unused_slots),
            f"{unused_share(slots, length):.1%}",
            f"{sequence.fit:,}",
        )
    table.caption = "sharing no prefix, with the default watermark of 2 %"
    table.caption_justify = "left"
    return table
