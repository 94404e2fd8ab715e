"""Runs the GPU's stages in order of value, within a given time, and prints one summary.

    bench/gpu/all.sh --seconds 480 --out DIR [--only STAGE...] [--from STAGE] [--peers DIR] [--device cpu --tiny]

Each stage gets a share of the time that is left, so time that a stage does not need goes to those after it. Stages run
in worker processes, which are killed if they do not end: a stage that fails, hangs or runs out of time never stops the
next. Rows go to DIR/rows.jsonl as they are measured, and a run with the same DIR measures only what is missing.
DIR/log.txt has what the stages print, DIR/kernels.txt the kernels of the profiled steps.

On a GPU, further processes compile the kernels while the tests of the first stage run. Without that stage, each stage
compiles what it needs itself. The summary tells how long that took.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from bench.gpu.summary import summarize

_GRACE_S = 12.0
# Kept for the summary, and for a last worker that has to be killed.
_RESERVE_S = 6.0
ROWS, LOG, KERNELS = "rows.jsonl", "log.txt", "kernels.txt"


class Stage(NamedTuple):
    """group: stages of one group share a process. seconds: its part of the whole, relative to the other stages."""

    name: str
    group: str
    seconds: float


STAGES = (
    Stage("correct", "tests", 150),
    Stage("decode", "engine", 85),
    Stage("profile", "engine", 40),
    Stage("s1", "load", 85),
    Stage("cold", "load", 25),
    Stage("lora", "kernels", 30),
    Stage("prefill", "kernels", 25),
    Stage("peers", "peers", 50),
    Stage("http", "server", 50),
)
# Each worker runs one of these.
_MODULES = {"peers": "bench.gpu.peers"}
_MODULE = "bench.gpu.stages"
# The groups whose kernels are compiled while the tests run.
WARMED = ("engine", "load", "kernels")


class Outcome(NamedTuple):
    """whole: whether the stage has measured all of its cases. error: None if the stage did not fail."""

    whole: bool
    error: str | None = None
    compiled: int = 0
    compile_s: float = 0.0


class Worker:
    """A process that runs stages one after another, and leads a process group, so that it ends with all it started.

    Importing its modules takes seconds, but it does not use the GPU before its first stage.
    """

    def __init__(self, command: Sequence[str], log: IO[bytes]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,  # Otherwise `select` would not see a line that was read ahead.
            start_new_session=True,
        )

    def begin(self, stage: str, end_s: float) -> None:
        """end_s: when the stage should end, on the clock `time.monotonic`, which is the same for all processes."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"stage": stage, "end_s": end_s}).encode() + b"\n")
            self._process.stdin.flush()

    def wait(self, seconds: float) -> Outcome:
        """Returns the outcome of the stage that has begun. Kills the worker if it takes longer than `seconds`."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, seconds))
        if not ready:
            self.kill()
            return Outcome(whole=False, error="killed, because it did not end in its time")
        line = self._process.stdout.readline()
        if not line:
            self.kill()
            return Outcome(whole=False, error=f"the process ended with code {self._process.returncode}")
        return Outcome(**json.loads(line))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def run_stages(
    stages: Sequence[Stage],
    seconds: float,
    make_worker: Callable[[Stage], Worker],
    note: Callable[[Stage, float, float, Outcome], None],
    beside_first: Callable[[float], None] = lambda seconds: None,
    grace_s: float = _GRACE_S,
) -> None:
    """Runs the stages, each for a share of the time that is left.

    note: called after each stage, with the seconds that it was given and took, and its outcome.
    beside_first: called once the first stage has begun, with its seconds. It may take as long as the stage.
    grace_s: a worker that is still busy so many seconds after the time of its stage is killed.
    """
    end = time.monotonic() + seconds
    workers: dict[str, Worker] = {}
    try:
        for position, stage in enumerate(stages):
            for group in [group for group in workers if group not in {s.group for s in stages[position:]}]:
                workers.pop(group).kill()
            groups = dict.fromkeys(later.group for later in stages[position:])
            # The next group's worker imports its modules while this one measures.
            for group in list(groups)[:2]:
                if group not in workers:
                    workers[group] = make_worker(next(s for s in stages[position:] if s.group == group))
            left = end - time.monotonic()
            given = left * stage.seconds / sum(other.seconds for other in stages[position:])
            if left <= 0:
                note(stage, 0.0, 0.0, Outcome(whole=False, error="no time was left"))
                continue
            worker = workers[stage.group]
            began = time.monotonic()
            worker.begin(stage.name, began + given)
            if position == 0:
                beside_first(given)
            outcome = worker.wait(min(given + grace_s, left + _RESERVE_S / 2) - (time.monotonic() - began))
            if outcome.error is not None:
                workers.pop(stage.group).kill()
            note(stage, given, time.monotonic() - began, outcome)
    finally:
        for worker in workers.values():
            worker.kill()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [stage.name for stage in STAGES]
    parser.add_argument("--seconds", type=float, default=480.0, help="the whole run, with the summary")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for rows and logs; rows there are kept"
    )
    parser.add_argument("--only", nargs="+", choices=names, help="run these stages")
    parser.add_argument("--from", dest="first", choices=names, help="begin with this stage")
    parser.add_argument(
        "--peers", type=Path, help="folder with the peers' kernels: see bench/gpu/peer_sources.py"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="go through the same with a tiny model")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    names = [stage.name for stage in STAGES]
    begun = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    options.out.mkdir(parents=True, exist_ok=True)
    stages = [
        stage
        for position, stage in enumerate(STAGES)
        if (options.only is None or stage.name in options.only)
        and (options.first is None or position >= names.index(options.first))
    ]
    rows = options.out / ROWS
    with ExitStack() as stack:
        log = stack.enter_context((options.out / LOG).open("ab"))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-warm-")))
        warm_log = stack.enter_context((options.out / "warm.txt").open("ab"))

        def command(group: str, out: Path, scale: str) -> list[str]:
            given = ["--out", str(out), "--device", options.device, "--scale", scale]
            peers = ["--peers", str(options.peers)] if options.peers else []
            return [sys.executable, "-P", "-m", _MODULES.get(group, _MODULE), *given, *peers]

        def make_worker(stage: Stage) -> Worker:
            return Worker(command(stage.group, options.out, "tiny" if options.tiny else "whole"), log)

        def note(stage: Stage, given_s: float, took_s: float, outcome: Outcome) -> None:
            row = {
                "stage": stage.name,
                "case": "stage",
                "given s": given_s,
                "took s": took_s,
                **outcome._asdict(),
            }
            row["at"] = time.monotonic() - begun
            with rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{stage.name}: {took_s:.0f} of {given_s:.0f} s; {outcome}", flush=True)

        def warm(seconds: float) -> None:
            compile_kernels(stages, seconds, lambda: Worker(command("engine", scratch, "warm"), warm_log))

        is_warmed = stages and stages[0].name == "correct" and options.device == "cuda"
        try:
            run_stages(
                stages,
                options.seconds - _RESERVE_S,
                make_worker,
                note,
                warm if is_warmed else lambda seconds: None,
            )
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        finally:
            print(summarize(rows), flush=True)


def compile_kernels(stages: Sequence[Stage], seconds: float, make_worker: Callable[[], Worker]) -> None:
    """Runs the stages of the warmed groups in a few seconds each, a group in each process, and waits for their end."""
    end = time.monotonic() + seconds
    groups: Mapping[str, list[Stage]] = {
        group: [stage for stage in stages if stage.group == group] for group in WARMED
    }
    workers = {group: make_worker() for group, chosen in groups.items() if chosen}
    try:
        for group, worker in workers.items():
            for stage in groups[group]:
                worker.begin(stage.name, end)
        for group, worker in workers.items():
            for stage in groups[group]:
                began = time.monotonic()
                outcome = worker.wait(end - began)
                print(f"compiling for {stage.name}: {outcome}", flush=True)
                if outcome.error is not None:
                    break
    finally:
        for worker in workers.values():
            worker.kill()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
