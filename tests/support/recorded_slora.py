"""Runs the `slora` command with a recorder of slow event-loop callbacks in its process.

Only the API process is recorded. The engine, the loader and other child processes are not. Use it with
`tests/api/served.py`:

    with serving(base, data_dir, command=recorded_slora(file)) as served:
        ...
        assert not slow_callbacks(file)
"""

import sys
from pathlib import Path

from slora_api.cli.main import main
from tests.support.slow_callbacks import BOUND_MS, SlowCallback, append_to, read_slow_callbacks, recording

__all__ = ["recorded_slora", "run", "slow_callbacks"]

_ROOT = Path(__file__).parents[2]


def recorded_slora(file: Path, bound_ms: float = BOUND_MS) -> tuple[str, ...]:
    """The command line to run in place of `slora`. Each callback that exceeds `bound_ms` is appended to `file` as
    one line."""
    code = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
        "from tests.support.recorded_slora import run; raise SystemExit(run())"
    )
    return (sys.executable, "-P", "-c", code, str(file), str(bound_ms))


def run() -> int:
    with recording(float(sys.argv[2]), append_to(Path(sys.argv[1]))):
        return main(sys.argv[3:])


def slow_callbacks(file: Path, since_s: float = 0.0, bound_ms: float = BOUND_MS) -> list[SlowCallback]:
    """Callbacks that used more than `bound_ms` of CPU time and ended at or after `since_s`, the slowest first.

    since_s: seconds since the epoch, as `time.time()` returns them.
    """
    found = [one for one in read_slow_callbacks(file, since_s) if one.cpu_ms > bound_ms]
    return sorted(found, key=lambda one: -one.cpu_ms)
