"""Programs of Debian packages that some tests run: PostgreSQL, Chromium and Prometheus."""

import os
from typing import NoReturn

import pytest

__all__ = ["skip_without"]


def skip_without(program: str, package: str) -> NoReturn:
    """Skips the test, because the machine has no `program`. In CI the test fails instead."""
    reason = f"there is no {program} on this machine; Debian's package is `{package}`"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
