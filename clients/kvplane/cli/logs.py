"""The services' structured logs, as a child process writes them: one JSON object a line."""

import json
from collections.abc import Sequence


def event_of(line: str) -> dict[str, object]:
    """A line of a service's log; empty for what is none."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def last_words(lines: Sequence[str]) -> str:
    """The last line of an output that is not empty."""
    said = [line for line in lines if line.strip()]
    return said[-1] if said else "it said nothing"


def last_warning(name: str, lines: Sequence[str]) -> str:
    """The newest warning or error, as `name: event (reason)`."""
    for line in reversed(lines):
        event = event_of(line)
        if event.get("level") in ("warning", "error"):
            detail = event.get("message") or event.get("reason")
            return f"{name}: {event.get('event')}" + (f" ({detail})" if detail else "")
    return ""
