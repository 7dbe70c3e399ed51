"""What the tests of the compute service share: a setup, and a sequence driven through it."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from compute_control import Blocks, ControlPlane, EngineSession
from compute_engine import WRITE_AND_ATTEND, RemoteEngine
from compute_oracle import Oracle
from kvplane.compute.server import ComputeServer

ORACLE = Oracle(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=16, dtype=torch.float32)
BLOCK_TOKENS = 4


@dataclass(eq=False)
class Setup:
    """A control plane, one shard, and where it is."""

    control: ControlPlane
    server: ComputeServer
    address: str
    folder: Path
    engines: list[RemoteEngine] = field(default_factory=list)
    next_block: int = 1
    pool_blocks: int = 64

    def engine(self, session: EngineSession | None = None) -> RemoteEngine:
        """A remote engine, on a new session unless one is given."""
        made = RemoteEngine(self.address, session or self.control.open_session())
        self.engines.append(made)
        return made

    def close_engines(self) -> None:
        """End what a test has opened."""
        for engine in self.engines:
            engine.close()
        self.engines.clear()

    def blocks(self, count: int) -> Blocks:
        """New occupants for blocks that no test has had; the pool is small, so they come round."""
        ids = [1 + (self.next_block - 1 + index) % (self.pool_blocks - 1) for index in range(count)]
        self.next_block += count
        return self.control.new_blocks(ids)


def step(
    engine: RemoteEngine, sequence: int, tokens: list[int], start: int, *grants: object, oracle: Oracle = ORACLE
) -> list[Tensor]:
    """Write and attend tokens from `start` to the end in one plan; returns the output of every layer."""
    plan = engine.plan({sequence: (len(tokens) - start, len(tokens))}, *grants)  # type: ignore[arg-type]
    outs = []
    for layer in range(oracle.num_layers):
        query, key, value = oracle.rows(tokens, start, len(tokens), layer)
        outs.append(engine.run(plan, layer, WRITE_AND_ATTEND, query=query, key=key, value=value))
    engine.close_plan(plan)
    return outs
