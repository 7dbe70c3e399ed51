"""Sessions that this shard serves: what the control plane said of them, kept in the directory, and what they run."""

import hmac
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from kvplane.compute.block_copies import BlockCopy
from kvplane.compute.occupancy import Ids, Occupancy
from kvplane.compute.plans import OpenPlan
from kvplane.compute.tables import Table
from kvplane.v1 import registry_pb2, types_pb2
from kvplane.wire import tables as directory_tables
from kvplane.wire.directory import Directory
from kvplane.wire.errors import (
    InvalidArgumentError,
    SessionExpiredError,
    StaleEpochError,
    UnauthenticatedError,
)
from kvplane.wire.identity import DIGEST_BYTES
from kvplane.wire.limits import NAME_BYTES


@dataclass(slots=True, eq=False)
class Session:
    """One session. Changed on the device thread; the event loop reads what decides whether a call may begin."""

    session_id: int
    lease_epoch: int
    tenant_id: str
    ttl_ms: int
    mode: types_pb2.SessionMode.ValueType
    max_sequences: int
    secret_sha256: bytes
    fenced: bool = False
    last_grant: int = 0
    reset_under: tuple[int, int] = (0, 0)
    """Incarnation and lease epoch of the newest reset."""
    needs_reset: bool = False
    """Its tables were lost with the process that had them: the next grant has to bring all of them."""
    tables: dict[int, Table] = field(default_factory=dict)
    plans: dict[tuple[int, int], OpenPlan] = field(default_factory=dict)
    """Open plans by stream and plan id."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Granted copies whose sources are not filled yet."""

    def check(self, lease_epoch: int) -> None:
        """Raises `SessionExpiredError` when it is fenced, `StaleEpochError` for another lease than its newest."""
        if self.fenced:
            raise SessionExpiredError(f"session {self.session_id} is fenced")
        if lease_epoch != self.lease_epoch:
            raise StaleEpochError(
                f"lease epoch {lease_epoch} of session {self.session_id} is not {self.lease_epoch}",
                metadata={"lease_epoch": str(self.lease_epoch)},
            )

    def pinned(self) -> list[Ids]:
        """Blocks of its open plans, which those pin."""
        return [plan.batch.ids for plan in self.plans.values() if not plan.ended]

    def end_plans(self, occupancy: Occupancy, sequence_ids: AbstractSet[int] | None = None) -> None:
        """End the open plans that name one of these sequences, or all: what they pin has become others' to write."""
        for plan in self.plans.values():
            named = sequence_ids is None or any(each in sequence_ids for each in plan.batch.sequence_ids.tolist())
            if named and not plan.ended:
                plan.ended = True
                occupancy.unpin(plan.batch.ids)


class Sessions:
    """The session table in the directory and its living counterpart."""

    def __init__(self, directory: Directory) -> None:
        self._rows = directory.sessions
        self._sessions: dict[int, Session] = {}
        for index in directory_tables.used(self._rows):
            row = self._rows[index]
            self._sessions[int(row["session_id"])] = Session(
                session_id=int(row["session_id"]),
                lease_epoch=int(row["lease_epoch"]),
                tenant_id=directory_tables.text(self._rows, index, "tenant").decode(),
                ttl_ms=int(row["ttl_ms"]),
                mode=types_pb2.SessionMode.ValueType(int(row["mode"])),
                max_sequences=int(row["max_sequences"]),
                secret_sha256=row["secret_sha256"].tobytes(),
                fenced=bool(row["fenced"]),
                last_grant=int(row["last_grant"]),
                needs_reset=True,
            )

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, session_id: int) -> Session | None:
        """The session, None when it is not known."""
        return self._sessions.get(session_id)

    def authenticate(self, session_id: int, lease_epoch: int, secret: bytes) -> Session:
        """The session of a caller that showed its secret. Raises `UnauthenticatedError`, `SessionExpiredError` or
        `StaleEpochError`."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionExpiredError(f"session {session_id} is not served here")
        if not hmac.compare_digest(sha256(secret).digest(), session.secret_sha256):
            raise UnauthenticatedError(f"wrong secret of session {session_id}")
        session.check(lease_epoch)
        return session

    def serve(self, message: registry_pb2.ServedSession, secret_sha256: bytes) -> Session:
        """Begin to serve a session, or take over its new lease. Raises `InvalidArgumentError`, `StaleEpochError` for an
        older lease, `LimitExceededError` when the table is full."""
        if len(secret_sha256) != DIGEST_BYTES:
            raise InvalidArgumentError.of("secret_sha256", f"has {len(secret_sha256)} bytes, not {DIGEST_BYTES}")
        if message.mode not in (types_pb2.SESSION_MODE_ATTACHED, types_pb2.SESSION_MODE_REMOTE):
            raise InvalidArgumentError.of("session.mode", "is not set")
        session = self._sessions.get(message.session_id)
        if session is None:
            return self._add(message, secret_sha256)
        if message.lease_epoch < session.lease_epoch:
            raise StaleEpochError(f"session {session.session_id} has lease epoch {session.lease_epoch} already")
        index = self._index(session)
        row = self._rows
        row["secret_sha256"][index] = np.void(secret_sha256)
        # A fence is for good: what it refused may have been given to others. Only a newer lease is served again.
        fenced = message.fenced or (session.fenced and message.lease_epoch == session.lease_epoch)
        row["ttl_ms"][index], row["fenced"][index] = message.ttl_ms, fenced
        row["lease_epoch"][index] = message.lease_epoch
        session.lease_epoch, session.ttl_ms, session.fenced = message.lease_epoch, message.ttl_ms, fenced
        session.secret_sha256 = secret_sha256
        return session

    def fence(self, session: Session) -> None:
        """Store that nothing of it runs any more."""
        session.fenced = True
        self._rows["fenced"][self._index(session)] = 1

    def granted(self, session: Session, number: int) -> None:
        """Store the newest grant that was applied."""
        session.last_grant = number
        self._rows["last_grant"][self._index(session)] = number

    def forget(self, session_id: int, lease_epoch: int) -> Session | None:
        """Drop a session of this lease or an older one; None when it is not there, or is newer."""
        session = self._sessions.get(session_id)
        if session is None or session.lease_epoch > lease_epoch:
            return None
        directory_tables.remove(self._rows, self._index(session))
        del self._sessions[session_id]
        return session

    def _add(self, message: registry_pb2.ServedSession, secret_sha256: bytes) -> Session:
        tenant = message.tenant_id.encode()
        if len(tenant) > NAME_BYTES:
            raise InvalidArgumentError.of("session.tenant_id", f"has {len(tenant)} bytes, at most {NAME_BYTES}")
        directory_tables.add(
            self._rows,
            "sessions",
            ttl_ms=message.ttl_ms,
            session_id=message.session_id,
            lease_epoch=message.lease_epoch,
            mode=message.mode,
            fenced=message.fenced,
            max_sequences=message.max_sequences,
            tenant_length=len(tenant),
            tenant=directory_tables.padded(tenant, NAME_BYTES),
            secret_sha256=np.void(secret_sha256),
        )
        session = Session(
            message.session_id,
            message.lease_epoch,
            message.tenant_id,
            message.ttl_ms,
            message.mode,
            message.max_sequences,
            secret_sha256,
            fenced=message.fenced,
        )
        self._sessions[session.session_id] = session
        return session

    def _index(self, session: Session) -> int:
        index = directory_tables.find(self._rows, session_id=session.session_id)
        assert index is not None, f"session {session.session_id} has no row"
        return index
