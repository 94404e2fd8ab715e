"""Our engine, in this project's own environment."""

import threading
from pathlib import Path

import torch

import bench.contenders.answering as answering
from bench.stepped_engine import SteppedEngine


class SloraEngine:
    def __init__(self, setup: answering.Setup) -> None:
        torch.set_num_threads(setup.threads)
        settings = {"dtype": setup.dtype, "pool_bytes": setup.pool_bytes, "swap_bytes": 0}
        self.version = f"torch {torch.__version__}"
        self._stepped = SteppedEngine(Path(setup.model), [Path(a) for a in setup.adapters], settings)

    def generate(self, run: answering.Run) -> int:
        for thread in threading.enumerate():
            if thread.name == "slora-prefault":  # it takes what time others leave: here, none for a minute
                thread.join()
        given = [() if one is None else (one,) for one in run.adapters]
        self._stepped.add(run.prompts, given, run.output_tokens)
        return self._stepped.finish()


if __name__ == "__main__":
    answering.answer(SloraEngine)
