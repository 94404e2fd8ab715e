"""How much memory a server takes, sampled from outside."""

import threading

import psutil

__all__ = ["MemoryMeter"]

_SAMPLE_S = 0.1


class MemoryMeter:
    """Samples the memory of a server's API process, and of it and all its children."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._peak = self._peak_tree = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def reset(self) -> int:
        """Forgets the peaks. Returns the present size of the API process."""
        self._peak = self._peak_tree = 0
        return self._now()

    def end(self) -> tuple[int, int, int]:
        """Bytes: the peak of the API process, the peak of all processes together, the API process now."""
        self._done.set()
        self._thread.join()
        return self._peak, self._peak_tree, self._now()

    def _now(self) -> int:
        # A process that was killed by its attack has no memory.
        try:
            return int(self._process.memory_info().rss)
        except psutil.Error:
            return 0

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            own = self._now()
            tree = own
            try:
                for child in self._process.children(recursive=True):
                    tree += int(child.memory_info().rss)
            except psutil.Error:
                continue
            self._peak, self._peak_tree = max(self._peak, own), max(self._peak_tree, tree)
