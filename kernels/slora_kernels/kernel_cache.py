"""Chooses the directory that keeps compiled kernels between starts.

An installation may be read-only, and its user may have no home directory. The server therefore names a directory of its
own as the last place, in `FALLBACK_VARIABLE`.
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_log = logging.getLogger("slora.kernels")

FALLBACK_VARIABLE = "SLORA_KERNEL_CACHE"


def choose_kernel_cache(preferred: str) -> Path | None:
    """Returns the first directory that can be written: `preferred`, slora's directory in the user's cache, or the
    server's. Returns None if there is none. Logs a line unless it is `preferred`.
    """
    places = [preferred, _find_user_cache(), os.environ.get(FALLBACK_VARIABLE)]
    return _choose(tuple(place for place in places if place))


@cache
def _choose(places: Sequence[str]) -> Path | None:
    first = places[0]
    for place in places:
        if _can_write(Path(place)):
            if place != first:
                _log.warning("compiled kernels are kept in %s, because %s cannot be written", place, first)
            return Path(place)
    _log.warning(
        "compiled kernels are not kept, so each start compiles them: none of %s can be written",
        ", ".join(places),
    )
    return None


def _find_user_cache() -> str | None:
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return str(root.expanduser() / "slora")
    except RuntimeError:  # The user has no home directory, or is not known on this machine.
        return None


def _can_write(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError:
        return False
    return True


def prepare_triton_cache() -> None:
    """Gives triton a directory that it can write. Without one, triton fails instead of compiling without a cache."""
    if os.environ.get("TRITON_CACHE_DIR"):
        preferred = os.environ["TRITON_CACHE_DIR"]
    else:
        preferred = os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")
    chosen = choose_kernel_cache(preferred)
    os.environ["TRITON_CACHE_DIR"] = str(chosen or tempfile.mkdtemp(prefix="slora-triton-"))
