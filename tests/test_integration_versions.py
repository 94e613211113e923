"""Adapters say which version of a framework they were tested with."""

import warnings

import pytest

from gdsdata.doctor import frameworks
from gdsdata.integrations import versions


@pytest.fixture
def with_version(monkeypatch):
    """Return a function that has torchtitan be installed in a version, or in none."""

    def install(version):
        found = frameworks.Installed("torchtitan", version, "0.3", frameworks._answer(TORCHTITAN, version), ())
        monkeypatch.setattr(versions, "installed", lambda: [found])

    return install


TORCHTITAN = frameworks.Framework(("torchtitan",), (0, 3), (0, 3), ())


def test_a_tested_version_is_imported_without_a_word(with_version):
    with_version("0.3.7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with versions.importing("torchtitan"):
            import json  # noqa: F401


@pytest.mark.parametrize("version", ["0.2.2", "0.4.0", "main"])
def test_another_version_is_a_warning(with_version, version):
    with_version(version)
    said = pytest.warns(RuntimeWarning, match=f"tested with version 0.3, and {version} is installed")
    with said, versions.importing("torchtitan"):
        pass


def test_a_version_without_what_is_needed_is_an_error_that_names_both(with_version):
    with_version("0.1.0")
    said = pytest.raises(ImportError, match="tested with version 0.3, and 0.1.0 is installed.*no_such_name")
    with said, versions.importing("torchtitan"):
        from json import no_such_name  # noqa: F401


def test_a_framework_that_is_absent_is_an_error_that_names_the_version(with_version):
    with_version(None)
    said = pytest.raises(ImportError, match="No module named 'no_such_module'.*tested with version 0.3: install")
    with said, versions.importing("torchtitan"):
        import no_such_module  # noqa: F401
