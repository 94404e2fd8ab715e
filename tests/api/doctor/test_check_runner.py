"""Checks run at once, for a limited time, and cannot stop one another."""

import threading
from collections.abc import Iterator

from slora.errors import ConfigError
from slora_api.doctor.check_runner import run_checks
from slora_api.doctor.finding import Check, Finding, Status, fine, warning
from slora_api.doctor.shared_fact import SharedFact


def test_a_check_that_hangs_fails_after_its_limit_and_keeps_what_it_found() -> None:
    released = threading.Event()

    def hang() -> Iterator[Finding]:
        yield fine("begun")
        released.wait()

    def end() -> Iterator[Finding]:
        yield fine("done")

    (late, has_late_ended), (prompt, has_ended) = run_checks(
        [Check("disk", hang, 0.05), Check("other", end, 600)]
    )
    released.set()
    assert (late.status, has_late_ended) == (Status.FAILS, False)
    assert late.detail == "no result within 0.05 s; begun" and "hangs" in late.remedy
    assert (prompt.status, prompt.detail, has_ended) == (Status.OK, "done", True)


def test_an_error_ends_a_check_with_its_message() -> None:
    def refuse() -> Iterator[Finding]:
        yield warning("odd", "mend it")
        raise ConfigError("it is wrong; do this")

    def break_down() -> Iterator[Finding]:
        yield fine(str(1 // 0))

    (refused, _), (broken, _) = run_checks([Check("a", refuse, 600), Check("b", break_down, 600)])
    assert (refused.detail, refused.remedy) == ("it is wrong; do this; odd", "mend it")
    assert broken.status is Status.FAILS and "ZeroDivisionError" in broken.detail


def test_a_shared_fact_is_found_once_and_its_error_reaches_all() -> None:
    calls: list[int] = []

    def find() -> int:
        calls.append(1)
        raise ConfigError("no")

    fact = SharedFact(find)
    assert fact.get_if_known() is None and fact.get_if_known() is None
    assert len(calls) == 1
