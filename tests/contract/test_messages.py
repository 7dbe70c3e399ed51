"""The generator of messages, and what the contract promises about every message."""

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract import messages, outline

SLOW_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
ANY_MESSAGE = st.one_of([messages.messages(descriptor) for descriptor in outline.messages()])


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW_CHECKS)
@given(ANY_MESSAGE)
def test_every_message_survives_the_wire(message: Message) -> None:
    """Serialize, parse, compare."""
    assert type(message).FromString(message.SerializeToString()) == message


REQUESTS = [descriptor for descriptor in outline.messages() if descriptor.name in ("StepRequest", "OpenSessionRequest")]


def paths(descriptor: Descriptor, prefix: str = "", depth: int = 0) -> set[str]:
    """Every field path of a message, nested ones included."""
    found = set()
    for field in descriptor.fields:
        found.add(prefix + field.name)
        if field.message_type is not None and depth < messages.MAX_DEPTH - 1:
            found |= paths(field.message_type, f"{prefix}{field.name}.", depth + 1)
    return found


def set_paths(message: Message, prefix: str = "") -> set[str]:
    """The field paths that a message sets."""
    found = set()
    for field, value in message.ListFields():
        found.add(prefix + field.name)
        if field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                found |= set_paths(each, f"{prefix}{field.name}.")
    return found


@pytest.mark.parametrize("descriptor", REQUESTS, ids=lambda descriptor: descriptor.name)
def test_generator_reaches_nested_fields(descriptor: Descriptor) -> None:
    """Of a request's field paths, deep ones included, hardly any is out of the fuzzer's reach."""
    wanted = {path for path in paths(descriptor) if ".details" not in path}
    seen: set[str] = set()

    @settings(max_examples=1500, deadline=None, database=None, derandomize=True, suppress_health_check=SLOW_CHECKS)
    @given(messages.messages(descriptor))
    def collect(message: Message) -> None:
        seen.update(set_paths(message))

    collect()
    assert len(wanted & seen) >= 0.85 * len(wanted), sorted(wanted - seen)


def test_v1_uses_no_map_that_the_generator_leaves_out() -> None:
    """Maps are not fuzzed; only answers may have them."""
    maps = [
        field.full_name
        for descriptor in outline.messages()
        for field in descriptor.fields
        if field.message_type is not None and field.message_type.GetOptions().map_entry
    ]
    assert maps == ["kvplane.v1.Decision.values"]
