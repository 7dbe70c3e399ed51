"""What a session hears unasked (revocations, notices, cuts after a restart of the service), told with results."""

from dataclasses import dataclass, field, replace

from kvplane.client import decode
from kvplane.client.device_work import DeviceWork
from kvplane.client.sequences import SequenceTable, row_of
from kvplane.client.values import Cut, Preemption, SequenceState, StepResult
from kvplane.v1 import cache_pb2


@dataclass(frozen=True, slots=True)
class Told:
    """What goes with one result."""

    revocations: tuple[Preemption, ...]
    notices: tuple[cache_pb2.Notice, ...]
    cuts: tuple[Cut, ...]


@dataclass(slots=True)
class Heard:
    """What came since the last result."""

    last_seen_notice: int = 0
    cuts: list[Cut] = field(default_factory=list)
    _revocations: list[Preemption] = field(default_factory=list)
    _revocation_ids: list[int] = field(default_factory=list)
    _notices: list[cache_pb2.Notice] = field(default_factory=list)

    def restarted(self) -> None:
        """The service was restarted: it numbers notices anew, and waits for no acknowledgement of those before. What
        they said has happened all the same, and is told."""
        self.last_seen_notice = 0
        self._revocation_ids.clear()

    def note(self, notice: cache_pb2.Notice, table: SequenceTable) -> None:
        """Take a notice: the tables show a revocation at once. One that comes again changes nothing."""
        if notice.notice_id <= self.last_seen_notice:
            return
        self.last_seen_notice = notice.notice_id
        if not notice.HasField("revocation"):
            self._notices.append(notice)
            return
        victims = decode.preemptions(notice.revocation.preemptions)
        for victim in victims:
            row = row_of(victim.sequence_id)
            if table.ids[row] == victim.sequence_id:
                table.change(row, SequenceState.PREEMPTED)
        self._revocations.extend(victims)
        self._revocation_ids.append(notice.revocation.revocation_id)

    @property
    def kept(self) -> dict[int, int]:
        """Token slots kept of every sequence that was cut since the last result."""
        kept: dict[int, int] = {}
        for cut in self.cuts:
            kept[cut.sequence_id] = min(cut.num_slots, kept.get(cut.sequence_id, cut.num_slots))
        return kept

    def tell(self, work: DeviceWork) -> Told:
        """All of it, which is over then. Only what the engine was told may be acknowledged: the service then takes what
        it says of a revoked sequence for meant, and refuses it."""
        for revocation_id in self._revocation_ids:
            work.revoked(revocation_id)
        told = Told(tuple(self._revocations), tuple(self._notices), tuple(self.cuts))
        for each in (self._revocations, self._revocation_ids, self._notices, self.cuts):
            each.clear()
        return told

    def added_to(self, result: StepResult, work: DeviceWork) -> StepResult:
        """A result with the notices that came behind it. What it started and they took back never ran for the engine,
        which reads victims first."""
        if not self._revocations and not self._notices:
            return result
        told = self.tell(work)
        gone = {victim.sequence_id for victim in told.revocations}
        return replace(
            result,
            admitted=tuple(each for each in result.admitted if each.sequence_id not in gone),
            changes=tuple(
                each for each in result.changes if each.sequence_id not in gone or each.state != SequenceState.RUNNING
            ),
            revocations=result.revocations + told.revocations,
            notices=result.notices + told.notices,
        )
