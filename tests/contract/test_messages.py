"""The generator of messages, and what the contract promises about every message."""

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract import messages, outline

ANY_MESSAGE = st.one_of([messages.messages(descriptor) for descriptor in outline.messages()])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(ANY_MESSAGE)
def test_every_message_survives_the_wire(message: Message) -> None:
    """Serialize, parse, compare."""
    assert type(message).FromString(message.SerializeToString()) == message


@pytest.mark.parametrize("name", ["StepRequest", "OpenSessionRequest", "ControlResponse", "ExecuteRequest"])
def test_generator_reaches_every_field(name: str) -> None:
    """No field of a request is out of the fuzzer's reach."""
    (descriptor,) = (each for each in outline.messages() if each.name == name)
    unseen = {field.name for field in descriptor.fields}

    @settings(
        max_examples=400,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(messages.messages(descriptor))
    def collect(message: Message) -> None:
        unseen.difference_update(field.name for field, _ in message.ListFields())

    collect()
    assert not unseen


def test_v1_uses_no_map_that_the_generator_leaves_out() -> None:
    """Maps are not fuzzed; only answers may have them."""
    maps = [
        field.full_name
        for descriptor in outline.messages()
        for field in descriptor.fields
        if field.message_type is not None and field.message_type.GetOptions().map_entry
    ]
    assert maps == ["kvplane.v1.Decision.values"]
