"""Events of a shard, kept until the control plane has confirmed them."""

from collections import OrderedDict
from collections.abc import Callable

from kvplane.v1 import registry_pb2


class Events:
    """The outbox. Used on the event loop alone."""

    def __init__(self) -> None:
        self._last = 0
        self._waiting: OrderedDict[int, registry_pb2.ShardEvent] = OrderedDict()
        self._send: Callable[[registry_pb2.ShardEvent], None] | None = None

    def add(self, event: registry_pb2.ShardEvent) -> None:
        """Number an event and send it, now or when the control plane is there."""
        self._last += 1
        event.event_id = self._last
        self._waiting[self._last] = event
        if self._send is not None:
            self._send(event)

    def opened(self, send: Callable[[registry_pb2.ShardEvent], None]) -> None:
        """A new stream is open: everything unconfirmed goes out again."""
        self._send = send
        for event in self._waiting.values():
            send(event)

    def closed(self) -> None:
        """The stream is gone."""
        self._send = None

    def confirm(self, event_id: int) -> list[registry_pb2.ShardEvent]:
        """Drop events up to this one, and return them."""
        seen = [number for number in self._waiting if number <= event_id]
        return [self._waiting.pop(number) for number in seen]
