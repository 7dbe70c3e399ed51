"""Features that a client may rely on. What is not named here is refused: proto3 drops unknown fields in silence."""

from collections.abc import Iterable

from kvplane.wire.errors import UnsupportedFeatureError

STEPS = "steps"
"""Sessions and steps with observe, commit, rollback, fork, finish, extend, advance and admit."""

SLIDING_WINDOW = "sliding_window"
"""Cache groups of kind SlidingWindow."""

CONTENT_SPANS = "content_spans"
"""Extra keys for content besides tokens."""

ADAPTER_SPANS = "adapter_spans"
"""Extra keys for tokens computed under another adapter."""

BUILT = frozenset({STEPS, SLIDING_WINDOW, CONTENT_SPANS, ADAPTER_SPANS})
"""What this release has built."""


def require(required: Iterable[str]) -> None:
    """Raises `UnsupportedFeatureError` that names the first feature which is unknown or not built."""
    for feature in required:
        if feature not in BUILT:
            raise UnsupportedFeatureError(
                f"feature {feature[:64]!r} is unknown to this server or not built", metadata={"feature": feature[:64]}
            )


def refuse(feature: str, field: str) -> UnsupportedFeatureError:
    """The error for a field whose behaviour is not built: never ignored, never a fake success."""
    return UnsupportedFeatureError(f"{field}: {feature} is not built", metadata={"feature": feature, "field": field})
