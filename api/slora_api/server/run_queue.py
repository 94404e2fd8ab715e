"""How long the threads of a process waited for a CPU, as Linux counts it in /proc/PID/task/TID/schedstat."""

from pathlib import Path

__all__ = ["RunQueue"]


class RunQueue:
    """The waits of one process. `pop_wait_s` returns 0 where the kernel does not count them, or the process is gone."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._waited_ns = self._read()

    def pop_wait_s(self) -> float:
        """Seconds that the thread with the longest wait has waited since the last call."""
        last, self._waited_ns = self._waited_ns, self._read()
        waits = (waited - last.get(thread, waited) for thread, waited in self._waited_ns.items())
        return max(waits, default=0) / 1e9

    def _read(self) -> dict[str, int]:
        """Nanoseconds on a run queue by thread. The counter grows when the wait ends."""
        waited: dict[str, int] = {}
        try:
            for task in self._tasks.iterdir():
                waited[task.name] = int((task / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return waited
        return waited
