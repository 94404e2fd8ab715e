"""The version of the installed package, and which others are installed."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def find_package_version() -> str:
    """Returns the version. It is read from the package's metadata once per process, because reading takes 0.8 ms."""
    return version("slora")


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
