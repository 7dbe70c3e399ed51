"""How a stream ends: its status reaches the peer, whenever it is decided."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvplane.v1 import cache_pb2
from kvplane.wire.errors import SessionExpiredError
from service_rig import RunningService
from tensorless_shard import TensorlessShard
from wire_engine import WireEngine

MakeService = Callable[..., tuple[RunningService, list[TensorlessShard]]]


def test_a_session_that_ends_while_its_stream_is_opened(service: MakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer is on its way out, with the headers, when the handler is told to end."""
    running, _ = service()
    engine = WireEngine(running.control())
    engine.stream.close()
    plane, control = running.server.plane, running.control()
    open_stream = plane.open_stream

    def open_and_end(*arguments: Any) -> Any:
        opened = open_stream(*arguments)
        closing = cache_pb2.CloseSessionRequest(
            session_id=engine.session_id, lease_epoch=engine.opened.lease_epoch, drained=True
        )
        asyncio.get_running_loop().call_soon(plane.close_session, closing)
        return opened

    monkeypatch.setattr(plane, "open_stream", open_and_end)
    stream = control.step(
        cache_pb2.StreamOpen(
            session_id=engine.session_id,
            lease_epoch=engine.opened.lease_epoch,
            stream_epoch=engine.opened.stream_epoch,
        )
    )
    assert stream.receive(5.0).HasField("opened")
    with pytest.raises(SessionExpiredError):
        stream.receive(5.0)
    stream.close()
