"""Matches names against regular expressions: as a module, or as a script in its own process with limits.

Python's matcher may need exponential time, even for a short pattern such as `(a+)+$`. `targeting.py` starts
this file by its path, so this file imports only the standard library. The argument is the id of the process that waits
for the answer. The script reads a JSON list of `[patterns, names, is_whole]` from its standard input, and answers each
entry with a line of JSON.
"""

import ctypes
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Sequence

CPU_SECONDS = 2
MEMORY_BYTES = 256 << 20
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ends this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        sys.exit(1)


def find_first_matches(patterns: Iterable[str], names: Sequence[str], *, is_whole: bool) -> list[int | None]:
    """Returns, for each name, the index of the first pattern that matches, or None. If `is_whole` is set, a pattern has
    to match the whole name, otherwise only the start of the name.

    Raises re.error.
    """
    compiled = [re.compile(pattern) for pattern in patterns]
    matchers = [pattern.fullmatch if is_whole else pattern.match for pattern in compiled]
    return [next((n for n, matches in enumerate(matchers) if matches(name)), None) for name in names]


def _answer(patterns: list[str], names: list[str], *, is_whole: bool) -> dict[str, object]:
    try:
        return {"matches": find_first_matches(patterns, names, is_whole=is_whole)}
    except MemoryError:
        return {
            "error": f"matching takes more than {MEMORY_BYTES >> 20} MiB of memory; simplify the patterns"
        }
    except (re.error, OverflowError, RecursionError) as error:
        return {"error": f"Python cannot compile a pattern: {error}"}


def main() -> None:
    die_with(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The soft limit sends SIGXCPU, which the waiting process recognises.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for patterns, names, is_whole in json.load(sys.stdin):
        print(json.dumps(_answer(patterns, names, is_whole=is_whole)), flush=True)


if __name__ == "__main__":
    main()
