"""Run granted copies: a fork's partial tail, before anything is written to its destination."""

from kvplane.compute.block_copies import BlockCopy
from kvplane.compute.sessions import Session
from kvplane.compute.state import Holding
from kvplane.wire.errors import KvplaneError


def run_copies(holding: Holding, session: Session) -> None:
    """Run the session's granted copies whose sources are filled; the others wait for the step that fills them.

    One whose blocks have got other occupants is dropped: its destination stays unfilled, and reading it is refused.
    """
    waiting: list[BlockCopy] = []
    for copy in session.copies:
        occupancy = holding.occupancy
        try:
            occupancy.check_current(copy.source_ids, copy.source_generations)
            occupancy.check_writable(
                copy.destination_ids, copy.destination_generations, copy.destination_starts, session.session_id
            )
        except KvplaneError:
            continue
        ends = copy.source_starts + copy.counts
        if (occupancy.filled(copy.source_ids, copy.source_generations) < ends).any():
            waiting.append(copy)
            continue
        occupancy.occupy(copy.destination_ids, copy.destination_generations, session.session_id)
        _copy(holding, copy)
        occupancy.fill(copy.destination_ids, copy.destination_starts + copy.counts)
    session.copies[:] = waiting


def _copy(holding: Holding, copy: BlockCopy) -> None:
    for layer in holding.pool.layers.values():
        for blocks in (*layer.keys, *layer.values):
            for index, count in enumerate(copy.counts.tolist()):
                read, write = int(copy.source_starts[index]), int(copy.destination_starts[index])
                source, destination = int(copy.source_ids[index]), int(copy.destination_ids[index])
                blocks[destination, :, write : write + count] = blocks[source, :, read : read + count]
