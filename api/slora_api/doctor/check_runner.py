"""Runs all checks at once. Each check has its own thread and a time limit."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence

from slora.errors import SloraError
from slora_api.doctor.finding import Check, Finding, Result, Status, failure

__all__ = ["run_checks"]

logger = logging.getLogger(__name__)

_ORDER = list(Status)


class _Run:
    """Runs one check on a daemon thread. If a disk or server hangs, a daemon thread does not keep the process alive."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._findings: list[Finding] = []
        self._ends_at = time.monotonic() + check.limit_s
        self._thread = threading.Thread(target=self._find, name=f"check {check.name}", daemon=True)
        self._thread.start()

    def _find(self) -> None:
        try:
            for finding in self._check.find():
                self._findings.append(finding)
        except (SloraError, OSError, ValueError) as error:
            self._findings.append(failure(str(error)))
        except Exception as error:
            logger.debug("the check %s failed", self._check.name, exc_info=True)
            self._findings.append(failure(f"the check itself failed: {type(error).__name__}: {error}"))

    def wait(self) -> tuple[Result, bool]:
        """Returns the result, and whether the check has ended."""
        self._thread.join(max(0.0, self._ends_at - time.monotonic()))
        is_late = self._thread.is_alive()
        findings = list(self._findings)
        if is_late:
            findings.append(
                failure(
                    f"no result within {self._check.limit_s:g} s", "find out what hangs: a disk or a server"
                )
            )
        findings.sort(key=lambda one: _ORDER.index(one.status))
        return Result(self._check.name, findings), not is_late


def run_checks(checks: Sequence[Check]) -> Iterator[tuple[Result, bool]]:
    """Yields the result of each check in the given order, and whether the check has ended."""
    for run in [_Run(check) for check in checks]:
        yield run.wait()
