"""The packages of the extra `gdsdata[bench]`, which are looked for before anything is measured."""

import importlib.util

PACKAGES = {
    "hydra": "hydra-core",
    "jinja2": "jinja2",
    "markdown_it": "markdown-it-py",
    "matplotlib": "matplotlib",
    "rich": "rich",
}


def lack(*modules):
    """Return which of these modules are not installed, and the remedy; "" if all are there."""
    missing = [PACKAGES[name] for name in modules or PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed: pip install 'gdsdata[bench]'" if missing else ""
