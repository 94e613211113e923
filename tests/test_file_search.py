"""The file of a sample is that of a binary search, however many files there are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsdata.io.engine import find_files


def files_by_search(first_sample, samples):
    return np.searchsorted(first_sample, samples, side="right") - 1


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 1000)), min_size=1, max_size=60).filter(any))
def test_it_is_that_of_a_binary_search(counts):
    first_sample = np.concatenate([[0], np.cumsum(counts)])
    samples = np.arange(first_sample[-1])
    assert np.array_equal(find_files(samples, first_sample), files_by_search(first_sample, samples))


@pytest.mark.parametrize("counts", [[1] * 9, [0, 0, 5, 0, 0], [10**9, *[1] * 99], [*[0] * 99, 10**12], [7] * 5000])
def test_it_is_that_of_a_binary_search_among_files_alike_and_unlike(counts):
    first_sample = np.concatenate([[0], np.cumsum(counts)])
    samples = np.append(np.random.default_rng(0).integers(0, first_sample[-1], 5000), [0, first_sample[-1] - 1])
    assert np.array_equal(find_files(samples, first_sample), files_by_search(first_sample, samples))
