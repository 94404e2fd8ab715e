"""A child process that does as its first argument says; started by the tests of the supervisor."""

import argparse
import asyncio
import os
import sys
import threading
from pathlib import Path

from slora_adapters.heartbeat import BEAT_S, Heartbeat, Progress


def end_with_stdin() -> None:
    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


async def serve(heartbeat: Heartbeat, told: Path, *, is_busy: bool) -> None:
    heartbeat.begin_serving()
    beating = asyncio.create_task(heartbeat.run(lambda: Progress(0, is_busy)))
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
    end_with_stdin()
    heartbeat = Heartbeat(arguments.heartbeat, computes_here=True)
    if arguments.behaviour in ("idle", "hangs"):
        asyncio.run(serve(heartbeat, arguments.told, is_busy=arguments.behaviour == "hangs"))
    heartbeat.explain(f"told to end with {arguments.behaviour}")
    sys.exit(int(arguments.behaviour))


main()
