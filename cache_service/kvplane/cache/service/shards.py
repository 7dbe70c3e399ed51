"""One compute service as the control plane sees it: its registration, its control stream, its unanswered commands.

No event loop in here: a command's end is told to whoever waits by a callback, so that the in-process twin needs none.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from google.rpc.status_pb2 import Status

from kvplane.v1 import registry_pb2
from kvplane.wire.errors import KvplaneError, SupersededError

Sender = Callable[[registry_pb2.ControlResponse], None]
"""Puts a command on a shard's open control stream."""


@dataclass(slots=True, eq=False)
class Command:
    """A command to one shard, until its acknowledgement has come."""

    message: registry_pb2.ControlResponse
    on_done: Callable[["Command"], None] | None = None
    ack: registry_pb2.CommandAck | None = None

    @property
    def failed(self) -> bool:
        """Whether the shard said that it could not carry it out."""
        return self.ack is not None and self.ack.status.code != 0


@dataclass(slots=True, eq=False)
class ShardLink:
    """One shard of a pool."""

    registration_id: int
    register: registry_pb2.RegisterRequest
    incarnation: int
    last_heard: float
    """When the last message came, in seconds."""
    sender: Sender | None = None
    close: Callable[[KvplaneError], None] | None = None
    """Ends the shard's open control stream."""
    _sequence: int = 0
    _last_event: int = 0
    _unanswered: dict[int, Command] = field(default_factory=dict)

    @property
    def boot_id(self) -> int:
        """Which start of the compute service this is."""
        return self.register.boot_id

    @property
    def rank(self) -> int:
        """Rank in the pool."""
        return self.register.shard.rank

    @property
    def connected(self) -> bool:
        """Whether the control stream is open."""
        return self.sender is not None

    @property
    def unanswered(self) -> int:
        """Commands without an acknowledgement."""
        return len(self._unanswered)

    def command(
        self, message: registry_pb2.ControlResponse, on_done: Callable[[Command], None] | None = None
    ) -> Command:
        """Send a command, now or when the stream is open again. Commands of a shard are carried out in order."""
        self._sequence += 1
        message.incarnation, message.boot_id, message.sequence = self.incarnation, self.boot_id, self._sequence
        command = Command(message, on_done)
        self._unanswered[self._sequence] = command
        if self.sender is not None:
            self.sender(message)
        return command

    def opened(self, sender: Sender, close: Callable[[KvplaneError], None]) -> None:
        """The control stream is open (again): everything without an acknowledgement is sent once more. The shard
        answers what it has carried out already with its stored acknowledgement."""
        if self.close is not None:
            self.close(SupersededError("the shard has opened a newer control stream"))
        self.sender, self.close = sender, close
        for command in self._unanswered.values():
            sender(command.message)

    def lost(self) -> None:
        """The control stream broke. The shard itself may well be there."""
        self.sender = self.close = None

    def next_event(self, event_id: int) -> bool:
        """Whether an event is new; one that was acted on comes again until its confirmation has arrived."""
        new = event_id > self._last_event
        self._last_event = max(self._last_event, event_id)
        return new

    def confirm_events(self) -> None:
        """Tell the shard which events were acted on."""
        if self.sender is not None:
            seen = registry_pb2.EventsSeen(event_id=self._last_event)
            self.sender(
                registry_pb2.ControlResponse(incarnation=self.incarnation, boot_id=self.boot_id, events_seen=seen)
            )

    def acknowledged(self, ack: registry_pb2.CommandAck) -> None:
        """A command was carried out. One that nobody waits for was acknowledged before."""
        command = self._unanswered.pop(ack.sequence, None)
        if command is None:
            return
        command.ack = ack
        if command.on_done is not None:
            command.on_done(command)

    def abandon(self, reason: str) -> None:
        """Nobody will acknowledge any more: every waiting command fails."""
        pending, self._unanswered = list(self._unanswered.values()), {}
        for command in pending:
            command.ack = registry_pb2.CommandAck(
                sequence=command.message.sequence, status=Status(code=14, message=reason)
            )
            if command.on_done is not None:
                command.on_done(command)


class Broadcast:
    """One command to all shards of a pool; it counts when every shard has acknowledged it."""

    def __init__(
        self,
        shards: Iterable[ShardLink],
        message: registry_pb2.ControlResponse,
        on_done: Callable[["Broadcast"], None] | None = None,
    ) -> None:
        links = list(shards)
        self.commands: list[Command] = []
        self._missing = len(links)
        self._on_done = on_done
        for link in links:
            copy = registry_pb2.ControlResponse()
            copy.CopyFrom(message)
            self.commands.append(link.command(copy, self._one_done))

    @property
    def done(self) -> bool:
        """Whether every shard has answered."""
        return self._missing == 0

    @property
    def failed(self) -> bool:
        """Whether a shard could not carry it out."""
        return any(command.failed for command in self.commands)

    def then(self, on_done: Callable[["Broadcast"], None]) -> None:
        """Call back when every shard has answered; at once when all have."""
        if self.done:
            on_done(self)
        else:
            self._on_done = on_done

    def _one_done(self, _: Command) -> None:
        self._missing -= 1
        # An acknowledgement may come while the last command is still being sent.
        if self._missing == 0 and self._on_done is not None:
            self._on_done(self)
