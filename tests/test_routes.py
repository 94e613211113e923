"""What ranks agree on before they pass bytes on between GPUs."""

import pytest

from gdsdata.collective.routes import GpuUse, lack_of


@pytest.mark.parametrize(
    ("uses", "lack"),
    [
        ([GpuUse(5, False), GpuUse(-7, False)], ""),
        ([GpuUse(5, False), GpuUse(0, False)], "a rank of the group has no GPU"),
        ([GpuUse(5, False), GpuUse(7, False), GpuUse(5, False)], "several ranks use the same GPU"),
        ([GpuUse(5, False), GpuUse(7, True)], "an earlier load has left transfers"),
    ],
)
def test_ranks_share_between_gpus_if_each_has_one_of_its_own(uses, lack):
    assert lack_of(uses).startswith(lack) and bool(lack_of(uses)) == bool(lack)
