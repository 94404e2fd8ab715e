"""A child process that behaves as its first argument says. The tests of the supervisor start it."""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from slora_adapters.process.heartbeat import BEAT_S, Heartbeat, WorkProgress


def end_with_stdin() -> None:
    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def compute_a_little() -> None:
    """Simulates a slow step on a busy machine: it uses a tenth of a core and completes nothing."""
    while True:
        since = time.thread_time()
        while time.thread_time() - since < 0.02:
            pass
        time.sleep(0.18)


async def serve(heartbeat: Heartbeat, told: Path, *, is_busy: bool) -> None:
    heartbeat.begin_serving()
    beating = asyncio.create_task(heartbeat.run(lambda: WorkProgress(0, is_busy)))
    await asyncio.sleep(2 * BEAT_S)
    told.touch()
    await beating


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument(
        "told", type=Path, help="file to make when the supervisor can know that this process is ready"
    )
    parser.add_argument("--heartbeat", type=int)
    arguments = parser.parse_args()
    if arguments.behaviour == "starts":
        arguments.told.touch()
        signal.pause()  # as a child whose imports take long, it does not yet read its standard input
    end_with_stdin()
    heartbeat = Heartbeat(arguments.heartbeat, computes_here=True)
    if arguments.behaviour == "computes":
        threading.Thread(target=compute_a_little, daemon=True).start()
    if arguments.behaviour == "parent":
        # Otherwise the kernel's hang-up could end it when its parent dies.
        ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); signal.pause()"
        child = subprocess.Popen([sys.executable, "-c", ignoring])
        arguments.told.with_name("child").write_text(str(child.pid), encoding="utf-8")
    if arguments.behaviour in ("idle", "parent", "hangs", "computes"):
        asyncio.run(serve(heartbeat, arguments.told, is_busy=arguments.behaviour not in ("idle", "parent")))
    heartbeat.explain(f"told to end with {arguments.behaviour}")
    sys.exit(int(arguments.behaviour))


main()
