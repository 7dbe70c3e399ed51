"""The client SDK: what an engine imports. It never picks a block id and never hides an error.

`Session` and `AsyncSession` keep an engine's lease and its block tables; `kvplane.client.compute` (extra `[compute]`)
reaches the bytes; `kvplane.client.integrations` puts kvplane under existing engines.
"""

from kvplane.client.async_session import AsyncSession
from kvplane.client.draft import StepDraft
from kvplane.client.errors import ForkedProcessError, LaunchPausedError, SessionClosedError
from kvplane.client.session import Session
from kvplane.client.values import (
    Admission,
    BlockCopy,
    Cut,
    FinishReason,
    Hit,
    HitReason,
    PoolStats,
    Preemption,
    SequenceState,
    Skipped,
    StateChange,
    StateReason,
    StepOperation,
    StepResult,
)
from kvplane.wire.errors import KvplaneError

__all__ = [
    "Admission",
    "AsyncSession",
    "BlockCopy",
    "Cut",
    "FinishReason",
    "ForkedProcessError",
    "Hit",
    "HitReason",
    "KvplaneError",
    "LaunchPausedError",
    "PoolStats",
    "Preemption",
    "SequenceState",
    "Session",
    "SessionClosedError",
    "Skipped",
    "StateChange",
    "StateReason",
    "StepDraft",
    "StepOperation",
    "StepResult",
]
