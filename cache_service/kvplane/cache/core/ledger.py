"""Exactly once, bounded: which step comes next, and what the last ones answered (I7)."""

from typing import Generic, TypeVar

from kvplane.wire.errors import (
    InvalidArgumentError,
    KvplaneError,
    LimitExceededError,
    PriorStepRejectedError,
    StepOutOfOrderError,
)

MAX_UNANSWERED_STEPS = 4

Answer = TypeVar("Answer")


class StepLedger(Generic[Answer]):
    """The steps of one stream epoch. `Answer` is whatever the caller repeats for a repeated step."""

    def __init__(self) -> None:
        self.newest_step = 0
        self._answers: dict[int, Answer | KvplaneError] = {}
        self._rejected_step = 0

    def begin(self, step_id: int, last_seen_step: int) -> Answer | KvplaneError | None:
        """The stored answer of a repeated step; None when the step is next and must be applied now.

        A step sent behind a rejected one is answered here, with the `PriorStepRejectedError` that is stored
        for it. Raises, without consuming the id: `InvalidArgumentError` when `last_seen_step` is not below
        `step_id`, `StepOutOfOrderError` when the step is neither next nor stored, and `LimitExceededError`
        when too many answers are unread.
        """
        if not 0 <= last_seen_step < step_id:
            raise InvalidArgumentError.of("last_seen_step", f"must be below step_id {step_id}")
        if step_id <= self.newest_step:
            if step_id not in self._answers:
                raise StepOutOfOrderError(
                    f"step {step_id} was answered and confirmed",
                    metadata={"newest_step": str(self.newest_step)},
                )
            return self._answers[step_id]
        if step_id != self.newest_step + 1:
            raise StepOutOfOrderError(
                f"step {step_id} came, {self.newest_step + 1} is next",
                metadata={"newest_step": str(self.newest_step)},
            )
        for confirmed in [step for step in self._answers if step <= last_seen_step]:
            del self._answers[confirmed]
        if len(self._answers) >= MAX_UNANSWERED_STEPS:
            raise LimitExceededError(
                f"{len(self._answers)} answers are not confirmed by last_seen_step",
                metadata={"limit": "unanswered_steps", "value": str(MAX_UNANSWERED_STEPS)},
            )
        if self._rejected_step > last_seen_step:
            self.newest_step = step_id
            self._answers[step_id] = PriorStepRejectedError(
                f"step {step_id} was sent behind step {self._rejected_step}, which was rejected",
                metadata={"rejected_step": str(self._rejected_step)},
            )
            return self._answers[step_id]
        return None

    def accept(self, step_id: int, answer: Answer) -> Answer:
        """The step was applied."""
        self.newest_step = step_id
        self._answers[step_id] = answer
        return answer

    def reject(self, step_id: int, error: KvplaneError) -> KvplaneError:
        """The step was malformed and changed nothing; its id is spent."""
        self.newest_step = step_id
        self._answers[step_id] = error
        self._rejected_step = step_id
        return error
