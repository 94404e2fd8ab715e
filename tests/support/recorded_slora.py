"""The `slora` command with a recorder of slow event-loop callbacks in its process.

The API process is recorded; the engine, the loader and other child processes are not. With `tests/api/served.py`:

    with serving(base, data_dir, command=recorded_slora(file)) as served:
        ...
        assert not slow_callbacks(file)
"""

import sys
from pathlib import Path

from slora_api.cli.main import main
from tests.support.slow_callbacks import (
    BOUND_MS,
    SlowCallback,
    append_to,
    read_slow_callbacks,
    recording,
)

__all__ = ["recorded_slora", "run", "slow_callbacks"]

_ROOT = Path(__file__).parents[2]


def recorded_slora(file: Path, bound_ms: float = BOUND_MS) -> tuple[str, ...]:
    """The command that stands for `slora`. Each callback over `bound_ms` becomes a line of `file`."""
    code = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
        "from tests.support.recorded_slora import run; raise SystemExit(run())"
    )
    return (sys.executable, "-P", "-c", code, str(file), str(bound_ms))


def run() -> int:
    with recording(float(sys.argv[2]), append_to(Path(sys.argv[1]))):
        return main(sys.argv[3:])


def slow_callbacks(file: Path, since_s: float = 0.0, bound_ms: float = BOUND_MS) -> list[SlowCallback]:
    """Callbacks since `time.time()` was `since_s` that took more CPU time than `bound_ms`, the worst first."""
    found = [one for one in read_slow_callbacks(file, since_s) if one.cpu_ms > bound_ms]
    return sorted(found, key=lambda one: -one.cpu_ms)
