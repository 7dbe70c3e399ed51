"""Kill the cache service under sessions with running sequences and a full cache, and start it again."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from _control_client import BLOCK_TOKENS, POOL, model

from kvplane.client.control import GrpcCacheControl, connect
from kvplane.v1 import cache_pb2, step_pb2, types_pb2
from kvplane.wire.errors import KvplaneError
from kvplane.wire.interface import StepStream
from kvplane.wire.packed import pack_u32, pack_u64, unpack_u32, unpack_u64

HERE = Path(__file__).parent
PROMPT_BLOCKS = 1000
"""Blocks of each published prompt."""

Stamp = Callable[[bytes, bytes], None]


@dataclass(slots=True)
class Sequence:
    """A running sequence as its engine knows it."""

    tokens: list[int]
    committed: int = 0
    blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)


class Session:
    """One engine that stamps what it is given, and says what it holds when the service is back."""

    def __init__(self, address: str, rows: int, stamp: Stamp) -> None:
        self._address = address
        self._stamp = stamp
        self._step = 0
        self.sequences: dict[int, Sequence] = {}
        self.cuts: dict[int, int] = {}
        self._dial()
        self.opened = self.control.open_session(
            cache_pb2.OpenSessionRequest(
                pool_id=POOL,
                model=model(),
                mode=types_pb2.SESSION_MODE_ATTACHED,
                max_sequences=rows,
                ttl_ms=60_000,
            )
        )
        self._open_stream()

    def exchange(self, step: step_pb2.Step) -> step_pb2.StepResult:
        """Send a step, wait for its result, stamp what is new."""
        self._step += 1
        step.step_id, step.last_seen_step = self._step, self._step - 1
        step.completed_steps = pack_u64([self._step - 1])
        self.stream.send(cache_pb2.StepRequest(step=step))
        result = self._receive().result
        for delta in result.table_deltas:
            blocks = unpack_u32("blocks", delta.blocks.block_ids).tolist()
            marks = unpack_u64("generations", delta.blocks.generations).tolist()
            counts = unpack_u32("counts", delta.counts).tolist()
            at = 0
            for sequence_id, count in zip(unpack_u64("ids", delta.sequence_ids).tolist(), counts, strict=True):
                known = self.sequences[sequence_id]
                known.blocks += blocks[at : at + count]
                known.generations += marks[at : at + count]
                at += count
            self._stamp(delta.blocks.block_ids, delta.blocks.generations)
        return result

    def admit(self, prompts: dict[int, np.ndarray]) -> None:
        """Start sequences and commit their prompts."""
        new = [step_pb2.NewSequence(sequence_id=name, tokens=pack_u32(tokens)) for name, tokens in prompts.items()]
        self.sequences |= {name: Sequence(tokens.tolist(), len(tokens)) for name, tokens in prompts.items()}
        result = self.exchange(step_pb2.Step(admit=step_pb2.Admit(sequences=new, order=pack_u64(list(prompts)))))
        assert len(result.admitted.sequence_ids) == 8 * len(prompts), result.state_changes
        lengths = pack_u32([len(tokens) for tokens in prompts.values()])
        commit = step_pb2.Commit(sequence_ids=pack_u64(list(prompts)), num_tokens=lengths)
        self.exchange(step_pb2.Step(commit=commit))

    def finish(self) -> None:
        """End all sequences; what they published stays."""
        names = list(self.sequences)
        reasons = pack_u32([step_pb2.FINISH_REASON_STOP] * len(names))
        self.exchange(step_pb2.Step(finish=step_pb2.Finish(sequence_ids=pack_u64(names), reasons=reasons)))
        self.sequences.clear()

    def decode(self, token: int) -> None:
        """One token for every sequence."""
        advance = step_pb2.Advance(
            sequence_ids=pack_u64(list(self.sequences)),
            tokens=pack_u32([token] * len(self.sequences)),
            num_committed=pack_u32([len(each.tokens) for each in self.sequences.values()]),
            num_slots=pack_u32([len(each.tokens) + 1 for each in self.sequences.values()]),
        )
        for each in self.sequences.values():
            each.committed = len(each.tokens)
            each.tokens.append(token)
        self.exchange(step_pb2.Step(advance=advance))

    def settle(self) -> None:
        """Wait until everything is published."""
        while True:
            result = self.exchange(step_pb2.Step())
            if result.published_step >= result.step_id - 1:
                return
            time.sleep(0.01)

    def come_back(self) -> None:
        """Resume and declare."""
        request = cache_pb2.OpenSessionRequest(pool_id=POOL, resume_token=self.opened.resume_token)
        while True:
            try:
                self.opened = self.control.open_session(request)
                break
            except KvplaneError as error:
                time.sleep(error.retry_after_seconds or 0.05)
                if error.retry_after_seconds is None:
                    self._channel.close()
                    self._dial()
        self._open_stream()
        declaration = cache_pb2.Declaration(
            sequences=[
                cache_pb2.DeclaredSequence(
                    sequence=step_pb2.NewSequence(sequence_id=name, tokens=pack_u32(each.tokens)),
                    num_prompt_tokens=1,
                    num_committed=each.committed,
                    table=[
                        types_pb2.BlockList(block_ids=pack_u32(each.blocks), generations=pack_u64(each.generations))
                    ],
                    state=step_pb2.SEQUENCE_STATE_RUNNING,
                )
                for name, each in self.sequences.items()
            ],
            last_sent_step=self._step,
            completed_steps=pack_u64([self._step]),
            last=True,
        )
        self.stream.send(cache_pb2.StepRequest(declaration=declaration))
        result = self._receive().declared
        cut = unpack_u64("cut", result.cut_sequence_ids).tolist()
        self.cuts = dict(zip(cut, unpack_u32("tokens", result.cut_tokens).tolist(), strict=True))

    def ready(self) -> bool:
        """Whether the pool is open."""
        pool = self.control.get_pool(cache_pb2.GetPoolRequest(pool_id=POOL)).pool
        return pool.state == types_pb2.POOL_STATE_READY

    def hits(self, tokens: np.ndarray) -> int:
        """Published blocks of a prompt."""
        # One token more than is published: the last one never hits.
        prompt = types_pb2.Prompt(tokens=pack_u32(np.append(tokens, np.uint32(1))))
        lookup = cache_pb2.LookupRequest(
            session_id=self.opened.session_id, lease_epoch=self.opened.lease_epoch, prompt=prompt
        )
        return self.control.lookup(lookup).hit_tokens // BLOCK_TOKENS

    def _dial(self) -> None:
        self._channel: grpc.Channel = connect(self._address)
        self.control = GrpcCacheControl(self._channel)

    def _open_stream(self) -> None:
        opening = cache_pb2.StreamOpen(
            session_id=self.opened.session_id,
            lease_epoch=self.opened.lease_epoch,
            stream_epoch=self.opened.stream_epoch,
        )
        self.stream: StepStream = self.control.step(opening)
        self._receive()

    def _receive(self) -> cache_pb2.StepResponse:
        while True:
            response = self.stream.receive(30)
            if not response.HasField("notice"):
                if response.HasField("rejected"):
                    raise RuntimeError(response.rejected)
                return response

    def close(self) -> None:
        """Leave."""
        self.stream.close()
        self._channel.close()


def service(address: str) -> "subprocess.Popen[bytes]":
    """A cache service."""
    flags = ["--listen", address, "--metrics-address", "", "--log-level", "error", "--watermark", "0"]
    return subprocess.Popen([sys.executable, "-m", "kvplane.cache", *flags], stderr=subprocess.DEVNULL)


def wrong_tables(sessions: list[Session], published: set[int]) -> int:
    """Sequences whose tables cannot be right: cut below what they had committed, with a block that another sequence
    has for other tokens, or with one that holds a published prompt."""
    owners: dict[int, tuple[int, ...]] = {}
    wrong = 0
    for session in sessions:
        for name, each in session.sequences.items():
            bad = session.cuts.get(name, each.committed) < each.committed
            bad |= len(each.blocks) * BLOCK_TOKENS < len(each.tokens)
            for index, block in enumerate(each.blocks):
                content = tuple(each.tokens[: (index + 1) * BLOCK_TOKENS])
                bad |= owners.setdefault(block, content) != content or block in published
            wrong += bad
    return wrong


def measure(folder: str, quick: bool) -> dict[str, float]:
    """Kill the service under load; keys as in `control_plane.py`."""
    num_sessions, rows, prompts = (2, 50, 4) if quick else (4, 250, 100)
    num_blocks = 20_000 if quick else 200_000
    address = f"unix:{folder}/recovery.sock"
    first = service(address)
    shard_command = [sys.executable, str(HERE.parent / "tests" / "tensorless_shard.py"), address, POOL]
    shard = subprocess.Popen(
        [*shard_command, str(num_blocks), str(BLOCK_TOKENS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert shard.stdin is not None
    assert shard.stdout is not None
    to_shard, from_shard = shard.stdin, shard.stdout

    def stamp(ids: bytes, generations: bytes) -> None:
        to_shard.write(f"{ids.hex()} {generations.hex()}\n")
        to_shard.flush()
        from_shard.readline()

    running = [first]
    try:
        wait_for_pool(address)
        rng = np.random.default_rng(5)
        sessions = [Session(address, rows, stamp) for _ in range(num_sessions)]
        filler = Session(address, 1, stamp)
        texts = [rng.integers(0, 128_000, PROMPT_BLOCKS * BLOCK_TOKENS, dtype=np.uint32) for _ in range(prompts)]
        published: set[int] = set()
        for serial, text in enumerate(texts, 1):
            filler.admit({serial << 32: text})
            published |= set(filler.sequences[serial << 32].blocks)
            filler.finish()
        for number, session in enumerate(sessions):
            lengths = 256 + np.arange(rows) % BLOCK_TOKENS
            tokens = [rng.integers(0, 128_000, length, dtype=np.uint32) for length in lengths]
            session.admit({1 << 32 | row: tokens[row] for row in range(rows)})
            for token in range(20):
                session.decode(token + number)
        for session in [*sessions, filler]:
            session.settle()
        assert sum(filler.hits(text) for text in texts) == prompts * PROMPT_BLOCKS
        begin = time.perf_counter()
        first.kill()
        first.wait()
        running.append(service(address))
        for session in [*sessions, filler]:
            session.come_back()
        declared = time.perf_counter() - begin
        while not filler.ready():
            time.sleep(0.005)
        seconds = time.perf_counter() - begin
        print(f"killed and back: {seconds:.2f} s to open, {declared:.2f} s until all sessions had declared")
        kept = sum(filler.hits(text) for text in texts)
        for session in sessions:
            for token in range(20):
                session.decode(100 + token)
        wrong = wrong_tables(sessions, published)
        for session in [*sessions, filler]:
            session.close()
    finally:
        to_shard.close()
        shard.terminate()
        shard.wait(20)
        for process in running:
            process.terminate()
            process.wait(20)
    return {
        "recovery_seconds": round(seconds, 3),
        "blocks_sealed": prompts * PROMPT_BLOCKS,
        "blocks_kept": kept,
        "wrong_tables": wrong,
    }


def wait_for_pool(address: str) -> None:
    """Until the pool is open. Raises `SystemExit` when it does not open."""
    for control in _controls(address):
        try:
            if control.get_pool(cache_pb2.GetPoolRequest(pool_id=POOL)).pool.state == types_pb2.POOL_STATE_READY:
                return
        except KvplaneError:
            pass
        time.sleep(0.05)
    raise SystemExit("the pool did not open")


def _controls(address: str) -> Iterator[GrpcCacheControl]:
    for _ in range(300):
        with connect(address) as channel:
            yield GrpcCacheControl(channel)
