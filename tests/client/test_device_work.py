"""What a session says of its device work: only what has completed counts as done."""

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
