"""`routes`: ranks agree on whether they pass bytes on between GPUs."""

import pytest

from gdsdata.collective.routes import GpuUse, lack_of


@pytest.mark.parametrize(
    ("uses", "lack"),
    [
        ([(5, False, 0), (-7, False, 0)], ""),
        ([(5, False, 2), (-7, False, 2)], ""),
        ([(5, False, 0), (0, False, 0)], "a rank of the group has no GPU"),
        ([(5, False, 0), (7, False, 0), (5, False, 0)], "several ranks use the same GPU"),
        ([(5, False, 1), (7, True, 1)], "an earlier load has left transfers"),
        ([(5, False, 1), (7, False, 0)], "some ranks use another GPU than in an earlier load"),
        ([(5, False, 1), (7, False, 2)], "some ranks use another GPU than in an earlier load"),
    ],
)
def test_ranks_share_between_gpus_if_each_has_one_of_its_own(uses, lack):
    found = lack_of([GpuUse(*use) for use in uses])
    assert found.startswith(lack) and bool(found) == bool(lack)
