"""The registry of RPCs and the code agree, in both directions."""

import pytest

from contract import implementations
from contract.registry import RPCS, Built, CallerOnly


def test_registry_names_every_rpc_and_no_other() -> None:
    """A new RPC is registered when it is added; a removed one is removed here too."""
    described = set(implementations.rpcs())
    missing, unknown = described - RPCS.keys(), RPCS.keys() - described
    assert not missing, f"not in tests/contract/registry.py: {sorted(missing)}"
    assert not unknown, f"in tests/contract/registry.py, but no RPC of the contract: {sorted(unknown)}"


@pytest.mark.parametrize("rpc", sorted(RPCS))
def test_registry_tells_the_truth(rpc: str) -> None:
    """What is registered as built is there, and what is there is registered as built."""
    entry = RPCS[rpc]
    servicers, clients, twins = (
        implementations.served_by(rpc),
        implementations.called_by(rpc),
        implementations.twins_of(rpc),
    )
    if isinstance(entry, CallerOnly):
        assert not servicers + twins, f"{rpc} is registered as not served, but the code has {servicers + twins}"
        assert entry.client in clients, f"{rpc}: no client call {entry.client}; the code has {clients}"
        return
    if not isinstance(entry, Built):
        found = servicers + clients + twins
        assert not found, f"{rpc} is registered as not built, but the code has {found}"
        return
    assert entry.servicer in servicers, f"{rpc}: no servicer method {entry.servicer}; the code has {servicers}"
    if entry.client is None:
        assert not clients, f"{rpc}: registered without a client, but the code has {clients}"
    else:
        assert entry.client in clients, f"{rpc}: no client call {entry.client}; the code has {clients}"
    assert ([entry.twin] if entry.twin else []) == twins, f"{rpc}: registered twin {entry.twin}; the code has {twins}"
    method = implementations.rpcs()[rpc]
    assert implementations.streams_answers(implementations.resolve(entry.servicer)) == method.server_streaming, (
        f"{rpc}: {entry.servicer} and the contract disagree about streaming"
    )
