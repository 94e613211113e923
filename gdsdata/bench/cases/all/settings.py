"""The settings of case=all, and their small values of quick=true."""

from dataclasses import dataclass, fields
from typing import ClassVar

from gdsdata.bench.cases.settings import CaseSettings, one_of, setting


@dataclass
class AllSettings(CaseSettings):
    """Every other case, one after the other, and one page of them all."""

    MAKES = "its data"
    SINGLE: ClassVar[dict[str, type[CaseSettings]]] = {}  # of the other cases, by name; the package of cases fills it

    cases: list[str] = setting([], "only these cases, e.g. [loader,io], in this order; empty: all there are")
    settings: list[str] = setting(
        [],
        "of one case each, e.g. [io.file_bytes=1073741824,loader.epochs=2]. `cache`, `seed`, `repeats` and "
        "`limit_seconds` here, data.*, engine.* and device are given to every case where they are not the defaults",
    )

    def check(self, data):
        for name in self.cases:
            one_of("case.cases", name, list(self.SINGLE))
        for one in self.settings:
            name, _, rest = one.partition(".")
            one_of(f"case.settings: {one}: its case", name, list(self.SINGLE))
            if rest.partition("=")[0] not in {item.name for item in fields(self.SINGLE[name])} or "=" not in rest:
                raise ValueError(f"case.settings: {one}: case={name} has no such setting; write {name}.NAME=VALUE")
        if self.rows:
            raise ValueError(f"case.rows={self.rows}: say whose: case.settings=[loader.rows=...]")

    def make_small(self):
        """Does nothing: each case does so by itself."""
