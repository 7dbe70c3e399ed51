"""A TCP proxy before a Unix socket that can cut, hold and delay what passes: a network to test with."""

import contextlib
import socket
import threading
import time
from pathlib import Path


class CutProxy:
    """Listens on loopback; forwards to a Unix socket. Threads per connection; `close` ends them all."""

    def __init__(self, target: str) -> None:
        self._target = target.removeprefix("unix:")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay_seconds = 0.0
        self.refuses = False
        """Whether new connections are closed at once."""
        self.connections = 0
        self._open = threading.Event()
        self._open.set()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self) -> None:
        """Break every connection; new ones are accepted."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def hold(self) -> None:
        """Let nothing pass, in either direction, until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Let everything pass again, what was held first."""
        self._open.set()

    def close(self) -> None:
        """End."""
        self.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses:
                near.close()
                continue
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(str(Path(self._target)))
            except OSError:
                far.close()
                near.close()
                continue
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.add((near, far))
            self.connections += 1
            self._start(self._pump, near, far)
            self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay_seconds:
                    time.sleep(self.delay_seconds)
                self._open.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _start(self, work: "object", *arguments: "object") -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)
