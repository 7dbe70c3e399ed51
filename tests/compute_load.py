"""An engine as a process of its own: it prefills sequences, decodes them together, and checks every output.

    python compute_load.py ADDRESS SESSION_ID LEASE_EPOCH SECRET_HEX GRANT_FILE SEQUENCES STEPS

It prints `begun` after the prefill and `right` at the end; with STEPS 0 it decodes until it is killed.
"""

import itertools
import sys
from pathlib import Path

import torch

from compute_control import EngineSession
from compute_engine import WRITE_AND_ATTEND, RemoteEngine
from compute_harness import ORACLE
from compute_oracle import assert_attention
from kvplane.v1 import step_pb2, types_pb2

PROMPT_TOKENS = 5


def tokens_of(session_id: int, sequence: int, count: int) -> list[int]:
    """Tokens of a sequence: no two sequences have the same."""
    return [1000 * session_id + 7 * sequence + index for index in range(count)]


def step(engine: RemoteEngine, sequences: int, start: int, end: int) -> None:
    """One step of all sequences, checked against dense attention."""
    plan = engine.plan(dict.fromkeys(range(sequences), (end - start, end)))
    prompts = [tokens_of(engine.session.session_id, sequence, end) for sequence in range(sequences)]
    for layer in range(ORACLE.num_layers):
        rows = [ORACLE.rows(tokens, start, end, layer) for tokens in prompts]
        query, key, value = (torch.cat([row[part] for row in rows]) for part in range(3))
        out = engine.run(plan, layer, WRITE_AND_ATTEND, query=query, key=key, value=value)
        expected = torch.cat([ORACLE.attention(tokens, start, end, layer) for tokens in prompts])
        assert_attention(out, expected)
    engine.close_plan(plan)


def main() -> None:
    address, session_id, lease_epoch, secret, grant, sequences, steps = sys.argv[1:]
    # Tiny operations by the thousand, beside another engine and the service: threads would only wait for each other.
    torch.set_num_threads(1)
    session = EngineSession(int(session_id), int(lease_epoch), bytes.fromhex(secret), types_pb2.SESSION_MODE_REMOTE)
    engine = RemoteEngine(address, session)
    engine.apply(step_pb2.Grant.FromString(Path(grant).read_bytes()))
    step(engine, int(sequences), 0, PROMPT_TOKENS)
    print("begun", flush=True)
    for index in itertools.count():
        if int(steps) and index == int(steps):
            break
        length = PROMPT_TOKENS + index
        if int(steps):
            step(engine, int(sequences), length, length + 1)
        else:
            # Attending again changes nothing, so it can go on for ever.
            plan = engine.plan(dict.fromkeys(range(int(sequences)), (0, PROMPT_TOKENS)))
            engine.close_plan(plan)
    print("right", flush=True)


if __name__ == "__main__":
    main()
