"""Lookups: how much of a prompt is published, and why the hit ends there."""

from kvplane.cache.core import Chain
from kvplane.cache.service.bounds import check_limit
from kvplane.cache.service.decode import Surroundings, decode_sequence
from kvplane.cache.service.pools import HostedPool
from kvplane.cache.service.prompts import prompt_sequence
from kvplane.cache.service.sessions import EngineSession
from kvplane.v1 import cache_pb2, types_pb2
from kvplane.wire.packed import unpack_u32


def lookup(
    pool: HostedPool, session: EngineSession, request: cache_pb2.LookupRequest, hashed: Chain | None, max_tokens: int
) -> cache_pb2.LookupResponse:
    """Answer a lookup; `hashed` is what was hashed of the prompt ahead. Raises what the prompt is refused for."""
    core = pool.open_core()
    prompt = request.prompt
    tokens = unpack_u32("prompt.tokens", prompt.tokens)
    check_limit("prompt_tokens", len(tokens) - 1, max_tokens)
    size = pool.template.model.block_tokens
    admit = decode_sequence(prompt_sequence(prompt), "prompt", Surroundings(size, session.namespace_id))
    chain = core.hash_prompt(admit.namespace_id, admit.tokens, dict(admit.extra_keys), hashed)
    cap = len(tokens) - 1
    if request.HasField("max_hit_tokens"):
        cap = min(cap, request.max_hit_tokens)
    chain = chain.cut(cap // size)
    hit = core.lookup(chain)
    if not len(chain):
        reason = types_pb2.HIT_REASON_TOO_SHORT
    elif hit == len(chain) * size:
        reason = types_pb2.HIT_REASON_FULL
    elif core.state.pool.index.was_evicted(chain.digest(hit // size)):
        reason = types_pb2.HIT_REASON_EVICTED
    else:
        reason = types_pb2.HIT_REASON_NEVER_SEEN
    return cache_pb2.LookupResponse(hit_tokens=hit, group_hit_tokens=hit.to_bytes(4, "little"), hit_reason=reason)
