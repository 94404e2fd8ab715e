"""A plugin of pytest that prints a failure at once, so that a run that is ended early still tells the reasons."""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message.partition("\n")[0] if crash is not None else ""
        print(f"\nFAILED {report.nodeid} - {message}\n{report.longreprtext}", flush=True)
