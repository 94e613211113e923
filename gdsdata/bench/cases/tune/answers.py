"""The answer of case=tune, in words and as options to copy."""

import json


def said(gain):
    """One clause: what was found."""
    if gain["ratio"] is None:
        return "no setting was better: the default is as good"
    times = f"{gain['ratio']:.2f} times the default's rate"
    if gain["low"] is not None:
        times += f" ({gain['low']:.2f} to {gain['high']:.2f}, 99 % interval of {gain['pairs']} pairs)"
    if gain["confirmed"]:
        return times
    return f"the default is as good, as far as can be told: what the search had found came to {times}"


def yaml_text(options, comment):
    """A file of Hydra's group `engine`."""
    lines = [f"# {comment}", "defaults:", "  - engine_options", "  - _self_", ""]
    return "\n".join([*lines, *(f"{name}: {json.dumps(value)}" for name, value in options.items())]).rstrip() + "\n"
