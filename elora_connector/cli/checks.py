"""What `elora doctor` found out about one thing, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Status(enum.Enum):
    """How it stands.  Only `FAIL` makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    `advice` is what to do, empty where all is well; `facts` are figures for programs.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status.value,
            "detail": self.detail,
            "advice": self.advice,
            "facts": dict(self.facts),
        }


def ok(name: str, detail: str, **facts: Any) -> Check:
    return Check(name, Status.OK, detail, facts=facts)


def warn(name: str, detail: str, advice: str, **facts: Any) -> Check:
    return Check(name, Status.WARN, detail, advice, facts)


def fail(name: str, detail: str, advice: str, **facts: Any) -> Check:
    return Check(name, Status.FAIL, detail, advice, facts)
