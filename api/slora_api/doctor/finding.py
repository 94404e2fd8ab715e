"""What `slora doctor` finds out: findings, and the result of one check, which has several of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Check", "Finding", "Result", "Status", "failure", "fine", "warning"]


class Status(StrEnum):
    """FAILS: a server with these settings does not start, or does not work."""

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
    """remedy: empty if `detail` names it already, as error messages do."""
    return Finding(Status.FAILS, detail, remedy)


@dataclass(frozen=True, slots=True)
class Check:
    """find: yields what it finds, and may raise the errors that a server would explain. limit_s: the longest wait."""

    name: str
    find: Callable[[], Iterator[Finding]]
    limit_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Result:
    """findings: the worst first."""

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
