"""The child processes of a process, found by what they run."""

import psutil

__all__ = ["find_children"]


def find_children(word: str, pid: int | None = None, *, recursive: bool = False) -> list[psutil.Process]:
    """Returns the running children of `pid`, by default of this process, with `word` in their command line.

    A process that ends meanwhile, or is dead but not reaped yet, is left out.
    """
    return [child for child in psutil.Process(pid).children(recursive) if _runs(child, word)]


def _runs(process: psutil.Process, word: str) -> bool:
    try:
        return word in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # psutil's error of a zombie is one of these, too
        return False
