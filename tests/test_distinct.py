"""The distinct numbers of an array."""

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis.extra import numpy as arrays

from gdsdata.distinct import distinct


@given(arrays.arrays(arrays.integer_dtypes() | arrays.boolean_dtypes(), arrays.array_shapes(min_side=0)))
def test_they_are_those_of_numpy(numbers):
    found = distinct(numbers)
    assert found.dtype == numbers.dtype and found.tolist() == np.unique(numbers).tolist()


def test_they_do_not_import_masked_arrays():
    code = "import sys, numpy; from gdsdata.distinct import distinct; distinct(numpy.arange(9)); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "gdsdata.distinct" in modules and "numpy.ma" not in modules
