"""What a session says of its device work: only what has completed counts as done."""

from typing import Any

from kvplane.client.device_work import DeviceWork
from kvplane.client.values import BlockCopy


def test_a_copy_is_acknowledged_when_what_launched_it_has_completed() -> None:
    """It was ordered by step 9 and launched by a plan on the tables of step 10, beside one on those of step 9."""
    work = DeviceWork(automatic=True, last_step=9)
    work.copies_told((BlockCopy(5, 1, 2, 3, 9, 7),))
    older = work.plan_opened()
    work.last_step = 10
    newer = work.plan_opened()
    work.copies_done([5])
    work.plan_closed(older)
    assert work.completed_step == 9
    assert work.take_acks() == []
    work.plan_closed(newer)
    assert work.take_acks() == [5]


def test_a_declaration_counts_what_runs_now() -> None:
    """A step was complete, and a plan was made on its tables again: it is not, for a service that asks what is held."""
    work = DeviceWork(automatic=True, last_step=5)
    assert work.completed_step == 5
    plan = work.plan_opened()
    assert work.completed_step == 5, "what was said is not taken back"
    assert work.declared_completed(6) == [4]
    work.plan_closed(plan)
    assert work.declared_completed(6) == [5]
    assert work.declared_completed(5) == [4], "the next step may be sent while more is launched"


def test_a_plan_that_closes_while_another_thread_looks() -> None:
    """The heartbeat's thread asks what has completed in the moment in which the engine closes its only plan."""
    work = DeviceWork(automatic=True, last_step=5)
    token = work.plan_opened()

    class ClosingBetween(dict[int, int]):
        def __bool__(self) -> bool:
            return True

        def values(self) -> Any:
            work.plan_closed(token)
            return super().values()

    work._open = ClosingBetween(work._open)  # noqa: SLF001 - where the threads meet
    assert work.declared_completed(6) == [5]
