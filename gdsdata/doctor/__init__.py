"""Find out what this machine can do for a file or a URL: ``python -m gdsdata.doctor``.

    for finding in gdsdata.doctor.examine("/data/train.bin"):
        print(finding.answer, finding.question, finding.evidence, finding.remedy)

Without ``--test`` the doctor measures nothing of a file, and it keeps nothing.

Checks reach files, tools and probes only through `evidence`. So every check is a function of a
`Host` and a `Place`, and also works on a folder of recorded evidence.
"""

from typing import TYPE_CHECKING

from gdsdata.lazy import lazily

if TYPE_CHECKING:  # for tools that read the code and do not run it
    from gdsdata.doctor.evidence import Host, RecordedHost, ThisHost
    from gdsdata.doctor.examination import CHECKS, REQUIREMENTS, diagnose, examine, works
    from gdsdata.doctor.finding import Finding

__all__ = ["CHECKS", "REQUIREMENTS", "Finding", "Host", "RecordedHost", "ThisHost", "diagnose", "examine", "works"]

_OF_EXAMINATION = ("CHECKS", "REQUIREMENTS", "URL_CHECKS", "diagnose", "examine", "locate", "this_host", "works")

__getattr__, __dir__ = lazily(
    __name__,
    {
        **dict.fromkeys(_OF_EXAMINATION, "examination"),
        **dict.fromkeys(("Host", "RecordedHost", "ThisHost"), "evidence"),
        **dict.fromkeys(("Place", "place_of"), "place"),
        "Finding": "finding",
    },
)
