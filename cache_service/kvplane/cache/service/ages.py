"""Since when things wait: sequences that are not admitted, references that device work keeps.

Looked at with every tick, so ages are exact to a quarter of a second and cost no step anything.
"""

from collections.abc import Iterable

import numpy as np

from kvplane.cache.core import CacheCore
from kvplane.cache.core.sequences import Status
from kvplane.cache.service.sessions import EngineSession

WAITING = (Status.WAITING, Status.PREEMPTED)
"""States of sequences that are not in the engine's batch and want to be."""


class Ages:
    """Ages in one pool, in seconds."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], float] = {}
        self._deferred: dict[int, float] = {}

    def look(self, core: CacheCore, sessions: Iterable[EngineSession], now: float) -> dict[str, float]:
        """Oldest waiting and stalled sequence, and oldest deferred reference; 0 where there is none."""
        rows, open_sessions = core.state.rows, list(sessions)
        waiting = np.flatnonzero(np.isin(rows.status, WAITING))
        keys = zip(rows.session_of[waiting].tolist(), rows.ids[waiting].tolist(), strict=True)
        self._waiting = {key: self._waiting.get(key, now) for key in keys}
        deferring = [each.session_id for each in open_sessions if each.core.deferred.coming]
        self._deferred = {session_id: self._deferred.get(session_id, now) for session_id in deferring}
        stalled = [since for each in open_sessions for since in each.stalled.values()]
        return {
            "waiting": _oldest(self._waiting.values(), now),
            "stalled": _oldest(stalled, now),
            "deferred": _oldest(self._deferred.values(), now),
        }


def _oldest(since: Iterable[float], now: float) -> float:
    return now - min(since, default=now)
