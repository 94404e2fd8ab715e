"""Reads how long the threads of a process waited for a CPU, from Linux's /proc/PID/task/TID/schedstat."""

from pathlib import Path


class RunQueue:
    """Measures the CPU waits of one process. `pop_wait_s` returns 0 if the kernel does not count waits, or if the
    process has ended.
    """

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._waited_ns = self._read()

    def pop_wait_s(self) -> float:
        """Returns the longest time, in seconds, that any one thread has waited since the last call."""
        last, self._waited_ns = self._waited_ns, self._read()
        waits = (waited - last.get(thread, waited) for thread, waited in self._waited_ns.items())
        return max(waits, default=0) / 1e9

    def _read(self) -> dict[str, int]:
        """Returns the nanoseconds that each thread has waited so far. A wait is counted when it ends."""
        waited: dict[str, int] = {}
        try:
            for task in self._tasks.iterdir():
                waited[task.name] = int((task / "schedstat").read_text(encoding="utf-8").split()[1])
        except (OSError, ValueError, IndexError):
            return waited
        return waited
