"""One-time tickets: what a session proved over gRPC, carried to the attach socket."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from kvplane.v1 import compute_pb2
from kvplane.wire.errors import LimitExceededError, UnauthenticatedError

TICKET_BYTES = 32
TICKET_SECONDS = 10.0
"""How long a ticket is good."""
MAX_TICKETS = 1024


@dataclass(frozen=True, slots=True)
class Ticket:
    """What its bearer may map."""

    session_id: int
    lease_epoch: int
    purpose: compute_pb2.AttachPurpose.ValueType
    rank: int
    arena_bytes: int
    expires: float


class Tickets:
    """Tickets that were given and not used. Used on the event loop alone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tickets: dict[bytes, Ticket] = {}

    def give(self, request: compute_pb2.AttachRequest) -> bytes:
        """A ticket for a request that was checked. Raises `LimitExceededError`."""
        now = self._clock()
        self._tickets = {key: ticket for key, ticket in self._tickets.items() if ticket.expires > now}
        if len(self._tickets) >= MAX_TICKETS:
            raise LimitExceededError(
                f"{MAX_TICKETS} tickets are out",
                metadata={"limit": "tickets", "value": str(MAX_TICKETS)},
                retry_after_seconds=TICKET_SECONDS,
            )
        key = secrets.token_bytes(TICKET_BYTES)
        self._tickets[key] = Ticket(
            request.session_id,
            request.lease_epoch,
            request.purpose,
            request.rank,
            request.arena_bytes,
            now + TICKET_SECONDS,
        )
        return key

    def take(self, key: bytes) -> Ticket:
        """Use a ticket up. Raises `UnauthenticatedError` when it was never given, was used, or is too old."""
        ticket = self._tickets.pop(key, None)
        if ticket is None or ticket.expires <= self._clock():
            raise UnauthenticatedError("the ticket is unknown, used or too old")
        return ticket
