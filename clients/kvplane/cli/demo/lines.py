"""Messages between the demo and its engines: one JSON object a line, over the pipes of a child process."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from kvplane.cli.child import Child
from kvplane.wire.errors import UnavailableError

Message = dict[str, Any]


def say(event: str, **values: Any) -> None:
    """In the child: one message to the demo."""
    print(json.dumps({"event": event, **values}), flush=True)


def heard() -> Iterator[Message]:
    """In the child: messages from the demo until it closes the pipe."""
    for line in sys.stdin:
        yield json.loads(line)


def tell(child: Child, **values: Any) -> None:
    """In the demo: one message to a child."""
    child.stdin.write(json.dumps(values) + "\n")
    child.stdin.flush()


def hear(child: Child, *wanted: str) -> Message:
    """In the demo: the next message. Raises `UnavailableError` with the child's last words when it ended, or when the
    message is none of the events `wanted`."""
    for line in child.stdout:
        if not line.startswith("{"):
            continue  # what a library prints
        message: Message = json.loads(line)
        if wanted and message["event"] not in wanted:
            raise UnavailableError(f"{child.name} said {message!r} instead of {' or '.join(wanted)}")
        return message
    raise UnavailableError(f"{child.name} ended", metadata={"hint": " | ".join(child.lines[-3:])})
