"""The control plane's commands, carried out on the device thread in the order of their numbers.

What was queued before a command has completed when it runs, so its acknowledgement means drained. One that comes again
is answered with the acknowledgement that was stored.
"""

from collections import OrderedDict
from collections.abc import Callable

from kvplane.compute import sealing
from kvplane.compute.pool import Pool, create_pool, reuse_pool
from kvplane.compute.state import Holding, ShardState
from kvplane.v1 import registry_pb2
from kvplane.wire import tables as directory_tables
from kvplane.wire.directory import DirectorySpec
from kvplane.wire.errors import (
    InternalError,
    InvalidArgumentError,
    KvplaneError,
    PreconditionError,
    StaleEpochError,
    UnavailableError,
)
from kvplane.wire.features import refuse
from kvplane.wire.identity import DIGEST_BYTES, ModelIdentity
from kvplane.wire.limits import NAME_BYTES
from kvplane.wire.status import to_status

STORED_ACKNOWLEDGEMENTS = 65_536
"""How many are kept for a control plane that did not get them."""


class Commands:
    """Carries out commands and remembers how they ended."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._acks: OrderedDict[int, registry_pb2.CommandAck] = OrderedDict()
        self._under = 0
        """Incarnation that the numbers are counted under."""
        self._last_sequence = 0

    @property
    def last_sequence(self) -> int:
        """Newest command carried out under the incarnation that the shard follows."""
        return self._last_sequence if self._under == self._state.incarnation else 0

    def carry_out(self, message: registry_pb2.ControlResponse) -> tuple[registry_pb2.CommandAck, bool]:
        """The acknowledgement of a command, and whether it was carried out now. Raises `SupersededError` for one of an
        older control plane, and `PreconditionError` for a gap: the stream has to start anew."""
        self._state.raise_incarnation(message.incarnation)
        if message.incarnation != self._under:
            self._under, self._last_sequence = message.incarnation, 0
            self._acks.clear()
        sequence = message.sequence
        if message.boot_id != self._state.identity.boot_id:
            error = StaleEpochError("the command is for another start of this shard", metadata={"epoch": "boot_id"})
            return registry_pb2.CommandAck(sequence=sequence, status=to_status(error)), False
        if sequence <= self._last_sequence:
            stored = self._acks.get(sequence)
            return stored if stored is not None else registry_pb2.CommandAck(sequence=sequence), False
        # The first command under an incarnation sets where its numbers begin: streams are in order, and what was not
        # acknowledged comes again first.
        if self._last_sequence and sequence != self._last_sequence + 1:
            raise PreconditionError(f"command {sequence} follows {self._last_sequence}")
        try:
            ack = self._dispatch(message)
        except KvplaneError as error:
            ack = registry_pb2.CommandAck(status=to_status(error))
        except Exception as error:  # a command that failed is answered, whatever went wrong
            ack = registry_pb2.CommandAck(status=to_status(InternalError(f"{type(error).__name__}: {error}")))
        ack.sequence = sequence
        self._last_sequence = sequence
        self._acks[sequence] = ack
        if len(self._acks) > STORED_ACKNOWLEDGEMENTS:
            self._acks.popitem(last=False)
        return ack, not ack.status.code

    def _dispatch(self, message: registry_pb2.ControlResponse) -> registry_pb2.CommandAck:
        kind = message.WhichOneof("command")
        if kind is None:
            raise InvalidArgumentError.of("command", "is not set, or unknown to this shard")
        handlers: dict[str, Callable[[], registry_pb2.CommandAck | None]] = {
            "create_pool": lambda: self._create_pool(message.create_pool),
            "seal": lambda: self._change_rows(lambda pool: sealing.seal(pool, message.seal)),
            "void_rows": lambda: self._change_rows(lambda pool: sealing.void(pool, message.void_rows)),
            "put_namespaces": lambda: self._put_namespaces(message.put_namespaces),
            "serve_session": lambda: self._serve(message.serve_session),
            "fence_session": lambda: self._fence(message.fence_session),
            "forget_session": lambda: self._forget(message.forget_session),
            "destroy_pool": lambda: self._destroy(message.destroy_pool),
            "pool_state": lambda: self._pool_state(message.pool_state),
            "raise_incarnation": lambda: None,
            "advance_epoch": lambda: self._advance(message.advance_epoch),
            "put_model": lambda: self._put_model(message.put_model),
            # The rows are uploaded by the event loop before this acknowledges them.
            "request_inventory": lambda: None,
        }
        handler = handlers.get(kind)
        if handler is None:
            raise refuse(kind, kind)
        return handler() or registry_pb2.CommandAck()

    def _pool(self) -> Holding:
        if self._state.holding is None:
            raise UnavailableError("this shard has no pool")
        return self._state.holding

    def _change_rows(self, change: Callable[[Pool], sealing.Mask]) -> registry_pb2.CommandAck:
        holding = self._pool()
        holding.occupancy.changes += 1
        return registry_pb2.CommandAck(success_bitmap=sealing.bitmap(change(holding.pool)))

    def _create_pool(self, command: registry_pb2.CreatePool) -> None:
        if command.num_blocks < 2:
            raise InvalidArgumentError.of("create_pool.num_blocks", "a pool has a null block and at least one more")
        segments = command.segments
        whole = len(segments) == 1 and (segments[0].segment, segments[0].first_block) == (0, 0)
        if segments and not (whole and segments[0].num_blocks == command.num_blocks):
            raise refuse("several segments", "create_pool.segments")
        identity = self._state.identity
        spec = DirectorySpec(
            num_blocks=command.num_blocks,
            block_tokens=identity.layout.block_tokens,
            model=identity.model,
            pool_epoch=command.pool_epoch,
            boot_id=identity.boot_id,
            incarnation=self._state.incarnation,
        )
        old = self._state.holding
        if old is not None and old.pool.num_blocks == command.num_blocks and not old.processes.some():
            _end_sessions(old)
            pool = reuse_pool(old.pool, spec)
        else:
            self._release()
            pool = create_pool(identity.folder, identity.layout, spec, identity.device)
        self._state.holding = Holding.of(pool, identity.folder)

    def _destroy(self, command: registry_pb2.DestroyPool) -> None:
        holding = self._state.holding
        if holding is not None and holding.pool.pool_epoch == command.pool_epoch:
            self._release()

    def _release(self) -> None:
        holding, self._state.holding = self._state.holding, None
        if holding is not None:
            _end_sessions(holding)
            users = [each.pidfd for each in holding.processes.all() if each.pidfd is not None]
            holding.pool.release(users, unlink=True)
            holding.processes.release()

    def _advance(self, command: registry_pb2.AdvanceEpoch) -> None:
        holding = self._pool()
        epoch = holding.pool.pool_epoch
        if command.pool_epoch < epoch:
            raise StaleEpochError(f"the pool has epoch {epoch} already", metadata={"epoch": "pool_epoch"})
        self._state.holding = holding.next_epoch(command.pool_epoch, keep_sealed=command.keep_sealed)

    def _put_model(self, command: registry_pb2.PutModel) -> None:
        model = command.model
        identity = ModelIdentity(
            model.weights_revision,
            model.tokenizer_revision,
            model.kv_dtype,
            model.block_tokens,
            model.kv_scales_digest,
            model.hash_version,
        )
        try:
            self._pool().pool.directory.put_model(identity.encode())
        except ValueError as error:
            raise InvalidArgumentError.of("put_model.model", str(error)) from error

    def _put_namespaces(self, command: registry_pb2.PutNamespaces) -> None:
        rows = self._pool().pool.directory.namespaces
        for each in command.namespaces:
            if len(each.root_digest) != DIGEST_BYTES or len(each.tenant_id.encode()) > NAME_BYTES:
                raise InvalidArgumentError.of("put_namespaces.namespaces", "a digest or a tenant has a bad length")
        for each in command.namespaces:
            directory_tables.put_namespace(
                rows, each.namespace_id, each.version, each.root_digest, each.tenant_id, each.identity
            )

    def _serve(self, command: registry_pb2.ServeSession) -> None:
        holding = self._pool()
        before = holding.sessions.get(command.session.session_id)
        lease_epoch = before.lease_epoch if before is not None else 0
        session = holding.sessions.serve(command.session, command.secret_sha256)
        if session.lease_epoch > lease_epoch:
            # Nobody may run or close them any more.
            session.end_plans(holding.occupancy)
            session.plans.clear()

    def _fence(self, command: registry_pb2.FenceSession) -> None:
        holding = self._state.holding
        # Without a pool, or without the session, nothing of it runs and nothing will.
        session = holding.sessions.get(command.session_id) if holding else None
        if holding is None or session is None or session.lease_epoch > command.lease_epoch:
            return
        holding.sessions.fence(session)
        session.end_plans(holding.occupancy)
        session.plans.clear()
        session.tables.clear()

    def _forget(self, command: registry_pb2.ForgetSession) -> None:
        self._fence(registry_pb2.FenceSession(session_id=command.session_id, lease_epoch=command.lease_epoch))
        if self._state.holding is not None:
            self._state.holding.sessions.forget(command.session_id, command.lease_epoch)

    def _pool_state(self, command: registry_pb2.PoolStateCommand) -> None:
        self._state.pool_state = command.state


def _end_sessions(holding: Holding) -> None:
    """Nothing of a pool's sessions runs on what comes after it."""
    for session in holding.sessions:
        session.fenced = True
        session.plans.clear()
