"""An API worker: a process that serves requests. The main process has number 0 on the board; see `api_workers.py`."""

import gc

if __name__ == "__main__":
    # Until `limit_garbage_collection`. Garbage collection would take an eighth of the time and find no garbage.
    gc.disable()

import argparse
import logging
import os
import socket
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from slora.client.replica_group import ReplicaGroup
from slora.core.errors import ConfigError, SloraError
from slora.core.setting import SettingRefused
from slora_adapters.errors import StoreUnavailable
from slora_adapters.process.children import end_with_stdin
from slora_adapters.process.heartbeat import Heartbeat, WorkProgress
from slora_adapters.process.logs import set_up_logging
from slora_adapters.process.shortage import Work, run_event_loop
from slora_api.adapters.base_model import BaseModelFiles
from slora_api.core.data_dir import DataDir
from slora_api.core.fair_loop import FairEventLoop
from slora_api.core.foundation import lay_foundation
from slora_api.core.host_board import HostBoard
from slora_api.core.key_masking import mask_keys
from slora_api.core.request_context import RequestFields
from slora_api.core.settings import Settings, read_settings
from slora_api.core.tracing import open_tracing
from slora_api.http.http_server import HttpServer
from slora_api.keys.key_record import open_admin_key
from slora_api.metrics.metrics import share_metrics
from slora_api.processes.replica_list import ReplicaList
from slora_api.serve.api_workers import WorkerConfig
from slora_api.serve.app import make_app
from slora_api.serve.background import HostState
from slora_api.serve.composition import background_work, build_services, make_batch_runner
from slora_api.serve.http_front import (
    connection_limits,
    limit_garbage_collection,
    prefer_event_loop,
    run_until_stopped,
)

logger = logging.getLogger("slora.api")


# Exit codes for the supervisor. _REFUSED_EXIT: the settings can never work. _TRY_LATER_EXIT: something outside this
# process is not ready.
_REFUSED_EXIT, _FAILED_EXIT, _TRY_LATER_EXIT = 2, 1, os.EX_TEMPFAIL


async def _serve(settings: Settings, config: WorkerConfig, heartbeat: Heartbeat) -> None:
    limits = connection_limits(settings)
    model = BaseModelFiles(settings, config.started_at)
    share_metrics(config.metrics, config.number)
    async with AsyncExitStack() as stack:
        data = DataDir(Path(settings.data_dir).resolve())
        listener = stack.enter_context(socket.socket(fileno=config.listener))
        board = HostBoard(config.board, config.board_size, config.number)
        client = ReplicaGroup(config.engine_sockets)
        replicas = ReplicaList(config.replicas, client) if config.replicas else None
        foundation = lay_foundation(stack, settings, data, client, board)
        services = build_services(foundation, model, config.metrics, replicas)
        # A worker never generates a key, because the main process has to print it.
        admin_key = open_admin_key(settings.admin_key, data.path, services.keys.store.pepper, is_needed=False)
        app = make_app(services, admin_key, board, open_tracing(stack, os.environ))
        work: list[Work] = [
            *background_work(services),
            *([replicas.follow] if replicas else []),
            make_batch_runner(services).run,
            HostState(services.generator, services.engines, board).follow,
            partial(heartbeat.run, lambda: WorkProgress(0, is_busy=False)),
        ]
        server = HttpServer(app, limits, settings.drain_seconds, board)
        limit_garbage_collection()
        prefer_event_loop()
        heartbeat.begin_serving()
        await run_until_stopped(
            server.serve([listener]),
            server.stop,
            services.generator.limiter,
            work,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="An API worker of slora. `slora serve` starts it.")
    parser.add_argument("--config", required=True, help="WorkerConfig as JSON")
    parser.add_argument("--heartbeat", type=int, help="file descriptor of the shared page for heartbeats")
    arguments = parser.parse_args()
    config = WorkerConfig.from_json(arguments.config)
    end_with_stdin()
    heartbeat = Heartbeat(arguments.heartbeat, computes_here=False)
    try:
        settings = read_settings(config.flags, os.environ)
        set_up_logging(
            settings.log_format,
            f"API worker {config.number}",
            RequestFields(),
            label=f"[{config.number}] ",
            mask=mask_keys,
        )
        run_event_loop(_serve(settings, config, heartbeat), FairEventLoop)
    except (SloraError, OSError, ValueError) as error:
        logger.error("%s", error)
        heartbeat.explain(str(error))
        if isinstance(error, ConfigError | SettingRefused):
            return _REFUSED_EXIT
        return _TRY_LATER_EXIT if isinstance(error, StoreUnavailable) else _FAILED_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
