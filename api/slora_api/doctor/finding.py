"""The findings of `slora doctor`. The result of one check may have several findings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Check", "Finding", "Result", "Status", "failure", "fine", "warning"]


class Status(StrEnum):
    """The severity of a finding. FAILS: a server with these settings does not start, or does not work."""

    FAILS = "fails"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    status: Status
    detail: str
    remedy: str = ""


def fine(detail: str) -> Finding:
    return Finding(Status.OK, detail)


def warning(detail: str, remedy: str = "") -> Finding:
    return Finding(Status.WARNING, detail, remedy)


def failure(detail: str, remedy: str = "") -> Finding:
    """Returns a finding with the status FAILS. remedy: empty if `detail` already says what to do."""
    return Finding(Status.FAILS, detail, remedy)


@dataclass(frozen=True, slots=True)
class Check:
    """One check. find: yields findings; may raise SloraError, OSError or ValueError, which become failures. limit_s:
    the time limit in seconds.
    """

    name: str
    find: Callable[[], Iterator[Finding]]
    limit_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check. findings: the worst finding first."""

    name: str
    findings: Sequence[Finding]

    @property
    def status(self) -> Status:
        return self.findings[0].status if self.findings else Status.OK

    @property
    def detail(self) -> str:
        return "; ".join(one.detail.rstrip(".") for one in self.findings)

    @property
    def remedy(self) -> str:
        return "; ".join(one.remedy for one in self.findings if one.remedy)
