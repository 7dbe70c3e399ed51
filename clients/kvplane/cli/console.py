"""What the command prints: results on standard output, everything else on standard error."""

from rich.console import Console
from rich.markup import escape

from kvplane.wire.errors import InvalidArgumentError, KvplaneError

FAILED, USAGE = 1, 2
"""Exit statuses."""

out = Console(highlight=False, soft_wrap=False)
"""For results."""

err = Console(stderr=True, highlight=False, soft_wrap=True)
"""For progress, logs and errors."""


def show_error(error: KvplaneError | OSError) -> int:
    """Print one line, and a second with what to do if the error knows it. Returns the exit status."""
    message = error.message if isinstance(error, KvplaneError) else _described(error)
    err.print(f"[bold red]kvplane:[/] {escape(' '.join(message.split()))}")
    hint = error.metadata.get("hint") if isinstance(error, KvplaneError) else None
    if hint:
        err.print(f"[dim]hint:[/] {escape(hint)}")
    return USAGE if isinstance(error, InvalidArgumentError) else FAILED


def _described(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def show_finding(good: bool, check: str, detail: str, hint: str) -> None:
    """One line of `kvplane check`, on standard output, and what to do about it."""
    sign, style = ("✓", "green") if good else ("✗", "bold red")
    out.print(f"[{style}]{sign}[/] {escape(check)}: {escape(detail)}", soft_wrap=True)
    if not good and hint:
        out.print(f"    [dim]→[/] {escape(hint)}", soft_wrap=True)
