"""Hints beside the messages of Hydra: the nearest name of a setting, or the list that is due."""

import dataclasses
import difflib
import re

from gdsdata.bench import settings
from gdsdata.bench.cases import SETTINGS as CASES
from gdsdata.bench.cases.settings import CaseSettings


def hints(overrides):
    """Yield a sentence for each override with an unknown name, or without the list that is due."""
    given = dict(one.split("=", 1) for one in overrides if re.match(r"(?!hydra\.)[\w.]+=", one))
    case = CASES.get(given.get("case", "loader"), CaseSettings)
    groups = {"case": case, "data": settings.DataSettings, "device": settings.DeviceSettings}
    groups["engine"] = settings.engine_schema()
    defaults = {
        f"{group}.{item.name}": getattr(cls(), item.name)
        for group, cls in groups.items()
        for item in dataclasses.fields(cls)
    }
    names = [*defaults, *groups, "quick"]
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            remedy = f"did you mean {near[0]}?" if near else "--help shows all"
            yield f"{name}={value}: there is no such setting here: {remedy}"
        elif isinstance(defaults.get(name), list) and value[:1] not in ("[", "$"):
            yield f"{name}={value}: a list is due: {name}=[{value}]"
