"""Findings and measured transfers, for people and for programs."""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from gdsdata.doctor.examination import CHECKS, URL_CHECKS
from gdsdata.doctor.finding import Finding
from gdsdata.doctor.transfers import Transfer

VERSION = 1
_ALL_CHECKS = {**CHECKS, **URL_CHECKS}
_ANSWER_COLUMNS, _QUESTION_COLUMNS = 9, 30
_wrapped = functools.partial(textwrap.wrap, break_on_hyphens=False, break_long_words=False)  # paths stay whole


def as_text(findings: Sequence[Finding], transfers: Sequence[Transfer], columns: int = 120) -> str:
    """Return an entry a check under its group's heading.

    It has answer, question and evidence, and below them the remedy.
    """
    by_name = {finding.name: finding for finding in findings}
    lines = []
    for heading, checks in _ALL_CHECKS.items():
        found = [by_name[check.__name__] for check in checks if check.__name__ in by_name]
        if found:
            lines += [heading, *(line for finding in found for line in _entry(finding, columns))]
    of_groups = {check.__name__ for checks in _ALL_CHECKS.values() for check in checks}
    others = [finding for finding in findings if finding.name not in of_groups]
    if transfers or others:
        lines += ["test", *_table(transfers), *(line for finding in others for line in _entry(finding, columns))]
    return "\n".join(lines)


def _entry(finding: Finding, columns: int) -> list[str]:
    asked = f"  {finding.answer:{_ANSWER_COLUMNS}}{finding.question:{_QUESTION_COLUMNS}}"
    lines = _wrapped(finding.evidence or "-", columns, initial_indent=asked, subsequent_indent=" " * len(asked))
    if finding.remedy:
        arrow = " " * (len(asked) - 3) + "-> "
        lines += _wrapped(finding.remedy, columns, initial_indent=arrow, subsequent_indent=" " * len(asked))
    return lines


def _table(transfers: Sequence[Transfer]) -> list[str]:
    if not transfers:
        return []
    lines = [f"  {'path':24} {'':6} {'GB/s':>7} {'cpu-s/GB':>9}  {'bytes':9} served by"]
    for row in transfers:
        if row.error:
            lines.append(f"  {row.path:24} {row.direction:6} {'-':>7} {'-':>9}  {row.outcome:9} {row.error}")
        else:
            ways = ", ".join(way for way, count in row.served_by.items() if count)
            figures = f"{row.gb_per_s:7.2f} {row.cpu_s_per_gb:9.3f}"
            lines.append(f"  {row.path:24} {row.direction:6} {figures}  {row.outcome:9} {ways}")
    return lines


def as_json(
    path: str, requirement: str, works: bool, findings: Sequence[Finding], transfers: Sequence[Transfer]
) -> str:
    """Return a JSON object of the report.

    It has ``version`` (of these fields), ``path``, ``require``, ``works`` (the exit status is 0),
    ``findings`` (each with the fields of `Finding`, and its ``group``) and ``transfers`` (each with
    those of `Transfer`).
    """
    groups = {check.__name__: heading for heading, checks in _ALL_CHECKS.items() for check in checks}
    document = {
        "version": VERSION,
        "path": path,
        "require": requirement,
        "works": works,
        "findings": [{"group": groups.get(finding.name, "test"), **asdict(finding)} for finding in findings],
        "transfers": [{**asdict(row), "outcome": row.outcome} for row in transfers],
    }
    return json.dumps(document, indent=1)
