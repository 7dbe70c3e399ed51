"""The cache core: a pure, deterministic state machine that owns the blocks of one pool.

No clock, no I/O, no randomness, no grpc, no tensor library: time and events go in as arguments, deltas and
decisions come out as values. Where to find a rule:

- `core`: `CacheCore`, what callers use; `config`, `requests`, `results`: its values
- `steps`: the order in which a step applies; `validation`, `row_checks`: what makes a step malformed
- `tokens`: observe, commit, rollback; `growth`: extend and preempt; `forks`; `admission`
- `columns`, `blocks`: block states, references, generations; `eviction`, `preemption`: the two policies
- `chains`: digests and namespaces; `prefix_index`: digest -> block; `groups`: attention kinds
- `sealing`: publish after write; `quiescence`: no reuse before the device is done
- `recovery`, `declarations`, `adoption`: a restart of the control plane: what survived, what engines hold
- `sequences`, `extents`: columns and storage of sequences; `sessions`, `ledger`: leases, exactly once
- `integrity`: the invariants, proved from scratch

A caller applies steps with `CacheCore.step`, hands what `take_seals` returns to the shards and reports their
acknowledgement to `acknowledge_seals`; only then can anybody hit those blocks.
"""

from kvplane.cache.core.chains import Chain
from kvplane.cache.core.config import CoreConfig
from kvplane.cache.core.core import CacheCore
from kvplane.cache.core.declarations import Declaration, Declared
from kvplane.cache.core.eviction import EvictionPolicy, LeastRecentlyUsed
from kvplane.cache.core.groups import FullAttention, SlidingWindow
from kvplane.cache.core.ledger import MAX_UNANSWERED_STEPS, StepLedger
from kvplane.cache.core.preemption import LatestArrival, PreemptionPolicy, RunningSequences
from kvplane.cache.core.recovery import Survivors
from kvplane.cache.core.requests import (
    Admit,
    Advance,
    Finish,
    FinishReason,
    Fork,
    Lengths,
    Observe,
    Step,
    TransferAck,
)
from kvplane.cache.core.results import (
    Admission,
    Copy,
    Cut,
    CutReason,
    HitReason,
    Operation,
    PoolStatistics,
    Preemption,
    Reason,
    SequenceState,
    Skipped,
    StateChange,
    StepResult,
    TableDeltas,
)
from kvplane.cache.core.sealing import SealBatch
from kvplane.cache.core.sessions import Session

__all__ = [
    "MAX_UNANSWERED_STEPS",
    "Admission",
    "Admit",
    "Advance",
    "CacheCore",
    "Chain",
    "Copy",
    "CoreConfig",
    "Cut",
    "CutReason",
    "Declaration",
    "Declared",
    "EvictionPolicy",
    "Finish",
    "FinishReason",
    "Fork",
    "FullAttention",
    "HitReason",
    "LatestArrival",
    "LeastRecentlyUsed",
    "Lengths",
    "Observe",
    "Operation",
    "PoolStatistics",
    "Preemption",
    "PreemptionPolicy",
    "Reason",
    "RunningSequences",
    "SealBatch",
    "SequenceState",
    "Session",
    "Skipped",
    "SlidingWindow",
    "StateChange",
    "Step",
    "StepLedger",
    "StepResult",
    "Survivors",
    "TableDeltas",
    "TransferAck",
]
