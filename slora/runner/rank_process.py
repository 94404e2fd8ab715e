"""The process of one rank that is not the leader. `process_group.py` starts it.

It gets its settings and its commands over a socket from the leader, its parent process. Its first message is None when
it is ready, or the reason why it refuses the settings. It answers None to each `FinishLoads`.

It ends when its standard input or the socket closes, so it never outlives the leader, even while it waits for other
ranks.
"""

import argparse
import logging
import os
import sys

import torch

from slora.core.errors import ConfigError
from slora.memory.host_memory import PageLockedMemory
from slora.models.collectives import Collectives
from slora.runner.model_part import find_device
from slora.runner.rank import FinishLoads, Rank
from slora.runner.rank_channel import CommandChannel, RankSettings
from slora_adapters.peft.packing import ByteArray
from slora_adapters.process.children import end_with_stdin
from slora_adapters.process.logs import LOG_FORMATS, set_up_logging

_log = logging.getLogger("slora.engine")
_BROKEN_EXIT = os.EX_SOFTWARE


def _serve(descriptor: int) -> None:
    """Obeys the leader, whose socket is `descriptor`. Raises EOFError when the leader closes it."""
    leader = CommandChannel(descriptor, on_arena=_page_lock_for_gpu)
    settings: RankSettings = leader.receive()
    config, spec, number = settings.config, settings.spec, settings.rank
    torch.set_num_threads(settings.num_threads)
    device = find_device(config, number)
    collectives = Collectives.connect(number, config.tensor_parallel_size, device, settings.path)
    try:
        rank = Rank(config, spec, collectives)
    except ConfigError as error:
        # The leader reports the error. If this process ended now, the leader would report a lost rank instead.
        leader.send(str(error))
        leader.receive()
        return
    leader.send(None)
    while True:
        command = leader.receive()
        rank.obey(command)
        if isinstance(command, FinishLoads):
            leader.send(None)


def _page_lock_for_gpu(arena: ByteArray) -> PageLockedMemory | None:
    return PageLockedMemory(arena) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def main() -> int:
    parser = argparse.ArgumentParser(description="A tensor-parallel rank of slora. The engine starts it.")
    parser.add_argument(
        "--socket", type=int, required=True, help="file descriptor of the socket to the leader"
    )
    parser.add_argument("--log-format", choices=LOG_FORMATS)
    arguments = parser.parse_args()
    if arguments.log_format is not None:
        set_up_logging(arguments.log_format, "engine rank")
    end_with_stdin()
    try:
        _serve(arguments.socket)
    except EOFError:
        return 0
    except Exception:
        _log.critical("a tensor-parallel rank failed; this process exits", exc_info=True)
        return _BROKEN_EXIT
    return 0


if __name__ == "__main__":
    # Without os._exit, Python would wait for the threads of the collectives, which may wait for other ranks.
    code = main()
    sys.stderr.flush()
    os._exit(code)
