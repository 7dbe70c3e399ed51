"""Random work over many crashes of the control plane; the world that judges it is in `crashing`."""

import pytest

from recovery.crashing import World


@pytest.mark.parametrize("seed", range(8))
def test_random_work_survives_crashes(seed: int) -> None:
    """Many seeds, many crashes each."""
    here = World(seed)
    here.run(400)
    assert here.crashes > 3
    assert here.kept > 0
