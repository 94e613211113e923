"""Checks and their answers: yes, no or unknown, with the evidence and the remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from gdsdata.doctor.evidence import Host
from gdsdata.doctor.place import Place


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: of the check, for programs.
        question: a few words. A yes is always the good answer.
        answer: "yes", "no" or "unknown".
        evidence: what was seen.
        remedy: what to do about it; empty if there is nothing to do.
    """

    name: str
    question: str
    answer: str
    evidence: str
    remedy: str = ""


@dataclass(frozen=True)
class Answer:
    """A finding without its question, as a check returns it."""

    answer: str
    evidence: str
    remedy: str = ""


def yes(evidence: str, remedy: str = "") -> Answer:
    return Answer("yes", evidence, remedy)


def no(evidence: str, remedy: str) -> Answer:
    return Answer("no", evidence, remedy)


def unknown(evidence: str, remedy: str = "") -> Answer:
    return Answer("unknown", evidence, remedy)


class Check(Protocol):
    """A function from evidence to a finding, with the question that it answers."""

    __name__: str
    question: str

    def __call__(self, host: Host, place: Place, /) -> Finding: ...


def check(question: str) -> Callable[[Callable[[Host, Place], Answer]], Check]:
    """Return a decorator: a function that answers becomes a check of that name."""

    def decorate(function: Callable[[Host, Place], Answer]) -> Check:
        @functools.wraps(function)
        def asked(host: Host, place: Place) -> Finding:
            found = function(host, place)
            return Finding(function.__name__, question, found.answer, found.evidence, found.remedy)

        made = cast(Check, asked)
        made.question = question
        return made

    return decorate
