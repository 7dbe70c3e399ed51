"""Ranges and hard limits: what is refused, and with which name."""

from kvplane.wire.errors import InvalidArgumentError, LimitExceededError


def check_range(field: str, value: int, low: int, high: int) -> None:
    """Raises `InvalidArgumentError` naming the field."""
    if not low <= value <= high:
        raise InvalidArgumentError.of(field, f"is {value}, must be between {low} and {high}")


def check_limit(name: str, used: int, limit: int) -> None:
    """Raises `LimitExceededError` naming the limit when there is no room for one more."""
    if used >= limit:
        raise LimitExceededError(
            f"the limit of {limit} {name} is reached", metadata={"limit": name, "value": str(limit)}
        )
