"""Which share of the data a process reads: what the environment says of it, and what of that makes no sense."""

import pytest

from gdsdata.ranks import rank_and_world_size


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("said", "expected"),
    [({}, (0, 1)), ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)), ({"WORLD_SIZE": "1"}, (0, 1)), ({"RANK": "0"}, (0, 1))],
)
def test_the_environment_says_rank_and_world_size(monkeypatch, said, expected):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert rank_and_world_size(None, None) == expected


@pytest.mark.parametrize(
    "said", [{"WORLD_SIZE": "4"}, {"RANK": "x", "WORLD_SIZE": "4"}, {"RANK": "1", "WORLD_SIZE": "-"}]
)
def test_an_environment_that_says_half_or_nonsense_is_refused(monkeypatch, said):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="of the environment, RANK is .* and WORLD_SIZE '.*': set both|are no numbers"):
        rank_and_world_size(None, None)


class Mesh:
    """A mesh of two nodes of four, of which this is the third process of the second."""

    mesh_dim_names, ndim = ("node", "gpu"), 2

    def get_coordinate(self):
        return [1, 2]

    def size(self, dim):
        return (2, 4)[dim]


@pytest.mark.parametrize(
    ("dims", "expected"), [("gpu", (2, 4)), (-2, (1, 2)), (("node", "gpu"), (6, 8)), ((1, 0), (5, 8))]
)
def test_dimensions_of_a_mesh_are_counted_with_the_first_outermost(dims, expected):
    assert rank_and_world_size(None, None, Mesh(), dims) == expected


@pytest.mark.parametrize("dims", [("gpu", "gpu"), (0, -2), ("node", 0)])
def test_a_dimension_named_twice_is_refused(dims):
    with pytest.raises(ValueError, match="twice"):
        rank_and_world_size(None, None, Mesh(), dims)
