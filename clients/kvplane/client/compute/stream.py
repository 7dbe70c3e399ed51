"""One Execute stream of one shard: requests out in order, answers in, each with a deadline."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import grpc

from kvplane.client.compute.topology import at_shard
from kvplane.client.state import SessionState
from kvplane.v1 import compute_pb2, types_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire.errors import (
    Code,
    DeadlineExceededError,
    KvplaneError,
    StaleEpochError,
    UnavailableError,
)
from kvplane.wire.status import from_rpc_error, from_status

REOPEN_SECONDS = 0.1
"""When a broken stream is worth another try."""

# Ends of a connection. Anything else that ends a stream is the shard's own word, and is told as it is.
_BROKEN = (Code.UNAVAILABLE, Code.CANCELLED, Code.UNKNOWN, Code.INTERNAL)


class _Call(Protocol):
    def __iter__(self) -> Iterator[compute_pb2.ExecuteResponse]: ...

    def cancel(self) -> bool: ...


class ShardStream:
    """An open stream. A thread reads it, so that waiting can have a deadline. Used by one thread besides."""

    def __init__(
        self, stub: ComputeServiceStub, state: SessionState, shard: types_pb2.Shard, timeout_seconds: float
    ) -> None:
        self.lease_epoch = state.lease_epoch
        self._shard = shard
        self._timeout = timeout_seconds
        self._requests: queue.SimpleQueue[compute_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[compute_pb2.ExecuteResponse | KvplaneError] = queue.SimpleQueue()
        self._last_id = 0
        self.error: KvplaneError | None = None
        """What ended the stream."""
        self._call: _Call = stub.Execute(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name=f"kvplane-execute-{shard.rank}", daemon=True)
        self._reader.start()
        opening = compute_pb2.ExecuteOpen(
            session_id=state.session_id, lease_epoch=state.lease_epoch, session_secret=state.secret
        )
        try:
            self.opened = self.receive(self.send(open=opening)).opened
            if self.opened.boot_id != shard.boot_id:
                raise at_shard(
                    StaleEpochError("the shard was started again", metadata={"epoch": "boot_id"}), self._shard
                )
        except BaseException:
            self.close()
            raise

    def send(self, **request: Any) -> int:
        """Send a request; returns its number for `receive`. Raises what ended the stream."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        self._last_id += 1
        self._requests.put(compute_pb2.ExecuteRequest(request_id=self._last_id, **request))
        return self._last_id

    def receive(self, request_id: int) -> compute_pb2.ExecuteResponse:
        """The answer to a request; answers that nobody waited for are passed over. Raises what refused the request,
        with the shard named, `DeadlineExceededError`, or what ended the stream."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = DeadlineExceededError(f"no answer within {self._timeout:g} s")
                raise at_shard(late, self._shard) from None
            if isinstance(answer, KvplaneError):
                self._answers.put(answer)
                raise answer.with_traceback(None)
            if answer.request_id == request_id:
                if answer.HasField("refused"):
                    raise at_shard(from_status(answer.refused), self._shard)
                return answer

    def close(self) -> None:
        """End the stream; the shard ends its plans."""
        self._requests.put(None)
        self._call.cancel()
        self._reader.join()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._answers.put(response)
            error: KvplaneError = UnavailableError("the shard ended the stream", retry_after_seconds=REOPEN_SECONDS)
        except grpc.RpcError as failed:
            error = from_rpc_error(failed)
            if error.code in _BROKEN and not isinstance(error, UnavailableError):
                error = UnavailableError(f"the stream broke: {error.message}", metadata=error.metadata)
            if isinstance(error, UnavailableError) and error.retry_after_seconds is None:
                error.retry_after_seconds = REOPEN_SECONDS
        self.error = at_shard(error, self._shard)
        self._answers.put(self.error)
        self._requests.put(None)
