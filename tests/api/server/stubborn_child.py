"""A child process that behaves as its first argument says. The tests of the supervisor start it."""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from slora_adapters.process.heartbeat import BEAT_S, Heartbeat, WorkProgress


def end_with_stdin() -> None:
    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


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
    if arguments.behaviour == "parent":
        # Otherwise the kernel's hang-up could end it when its parent dies.
        ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); signal.pause()"
        child = subprocess.Popen([sys.executable, "-c", ignoring])
        arguments.told.with_name("child").write_text(str(child.pid), encoding="utf-8")
    if arguments.behaviour in ("idle", "parent", "hangs"):
        asyncio.run(serve(heartbeat, arguments.told, is_busy=arguments.behaviour == "hangs"))
    heartbeat.explain(f"told to end with {arguments.behaviour}")
    sys.exit(int(arguments.behaviour))


main()
