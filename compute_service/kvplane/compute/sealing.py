"""Seals and voids: what the control plane says of written blocks, stored in their rows."""

import numpy as np
import numpy.typing as npt

from kvplane import kernels
from kvplane.compute.block_copies import blocks_of
from kvplane.compute.pool import Pool
from kvplane.v1 import registry_pb2
from kvplane.wire import directory
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.identity import DIGEST_BYTES
from kvplane.wire.packed import unpack_u32

Mask = npt.NDArray[np.bool_]


def seal(pool: Pool, command: registry_pb2.Seal) -> Mask:
    """Seal rows; returns which were. A row is refused when its generation is not the stamp's or is below the row's,
    and when the shard itself has not seen the block filled. Raises `InvalidArgumentError` and seals nothing."""
    ids, generations = blocks_of(command.blocks, "seal.blocks", pool.num_blocks)
    count = len(ids)
    if len(np.unique(ids)) != count:
        raise InvalidArgumentError.of("seal.blocks", "a block is named twice")
    for name in ("digests", "parent_digests"):
        if len(getattr(command, name)) != count * DIGEST_BYTES:
            raise InvalidArgumentError.of(f"seal.{name}", f"has no {DIGEST_BYTES} bytes for each of {count} blocks")
    rows, size = pool.directory.blocks, pool.layout.block_tokens
    present = rows["generation"][ids]
    done: Mask = (generations == pool.stamps[ids]) & (generations >= present)
    # A row of this generation was filled through this shard, which knows how far. An attached engine fills its blocks
    # by itself: their rows are still those of the occupant before.
    done &= (present != generations) | (rows["filled"][ids] == size)
    content = np.zeros(count, directory.BLOCK_ROW)
    content["generation"] = generations
    content["filled"] = size
    content["depth"] = unpack_u32("seal.depths", command.depths, count)
    content["namespace_id"] = unpack_u32("seal.namespace_ids", command.namespace_ids, count)
    content["digest"] = np.frombuffer(command.digests, f"V{DIGEST_BYTES}")
    content["parent"] = np.frombuffer(command.parent_digests, f"V{DIGEST_BYTES}")
    directory.seal(rows, ids[done], content[done])
    return done


def void(pool: Pool, command: registry_pb2.VoidRows) -> Mask:
    """Unseal rows whose generations are the given ones; returns which were. With `zeroize` their bytes go as well.
    Raises `InvalidArgumentError`."""
    ids, generations = blocks_of(command.blocks, "void_rows.blocks", pool.num_blocks)
    done: Mask = pool.directory.blocks["generation"][ids] == generations
    directory.void(pool.directory.blocks, ids[done])
    if command.zeroize:
        # Only while the stamp is the row's: a newer occupant's bytes are not ours to erase.
        erase = np.unique(ids[done & (pool.stamps[ids] == generations)])
        pool.directory.blocks["filled"][erase] = 0
        for layer in pool.layers.values():
            kernels.zero_blocks(layer, erase)
    return done


def bitmap(mask: Mask) -> bytes:
    """Which blocks of a command succeeded, one bit per block; empty when all did."""
    return b"" if mask.all() else np.packbits(mask, bitorder="little").tobytes()
