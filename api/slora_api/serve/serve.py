"""`slora serve` and `slora demo`: the start of a server.

The order is: data directory and its lock, port, child processes, and then the main process (`main_process.py`). This
module imports only what the children need, because they take seconds to start.
"""

import argparse
import asyncio
import gc
import importlib
import importlib.util
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from slora.core.errors import ConfigError, SloraError
from slora.core.setting import SettingRefused
from slora_adapters.process.logs import print_line, set_up_logging
from slora_adapters.process.shortage import run_despite_shortage, run_event_loop
from slora_api.adapters.base_model import BaseModelFiles, with_local_model
from slora_api.cli.declaration import VARIABLES, argument, command, setting_flags
from slora_api.core.data_dir import ensure_temporary_directory, open_data_dir
from slora_api.core.fair_loop import FairEventLoop
from slora_api.core.key_masking import mask_keys
from slora_api.core.request_context import RequestFields
from slora_api.core.server_address import open_listener
from slora_api.core.settings import Settings, explain_unknown_variables, read_settings, server_setting_specs
from slora_api.processes.children import engines_and_loader, open_sockets
from slora_api.processes.device import check_num_gpus
from slora_api.processes.supervisor import Supervisor
from slora_api.serve.demo import Demo, choose_dtype, find_demo
from slora_api.serve.host import ClusterEngines, Host

logger = logging.getLogger("slora.serve")

_POLL_S, _MAX_POLLS = 0.01, 100
# `main_process` imports them. Without them, no child is started.
for _package in ("fastapi", "uvicorn"):
    if importlib.util.find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)


async def _serve(settings: Settings, flags: Mapping[str, Any], cluster: ClusterEngines | None) -> None:
    model = BaseModelFiles(settings)
    if cluster is None:
        check_num_gpus(settings.engine)
    async with AsyncExitStack() as stack:
        data = stack.enter_context(open_data_dir(Path(settings.data_dir)))
        ensure_temporary_directory(data)
        listener = stack.enter_context(open_listener(settings.host, settings.port))
        sockets = open_sockets(stack, data, settings.replicas)
        stalls: dict[str, str] = {}
        restarts: Counter[str] = Counter()
        children = cluster.children if cluster else engines_and_loader(settings, model, data, sockets)
        supervisor = Supervisor(
            children,
            settings.stall_seconds,
            stalls,
            lambda name: restarts.update([name]),
        )
        supervising = asyncio.create_task(run_despite_shortage(supervisor.run))
        stack.push_async_callback(_cancel, supervising)

        async def supervise() -> None:
            await supervising

        # The engine imports torch while this process imports what answers requests. The children start later if the
        # machine lacks a resource.
        for _ in range(_MAX_POLLS):
            if len(supervisor.pids) == len(children) or supervising.done():
                break
            await asyncio.sleep(_POLL_S)
        # Until `limit_garbage_collection`. Garbage collection would take an eighth of the time and find no garbage.
        gc.disable()
        main_process = importlib.import_module("slora_api.serve.main_process")
        host = Host(settings, data, listener, sockets, supervise, stalls, restarts, cluster)
        await main_process.run_main_process(stack, host, flags, model)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@command("serve", None, setting_flags(server_setting_specs()), epilog=VARIABLES)
def main(arguments: argparse.Namespace) -> int:
    """Runs a server until a signal stops it. Returns the exit code."""
    try:
        settings = read_settings(vars(arguments), os.environ)
    except (ConfigError, SettingRefused) as error:
        print_line(f"slora: {error}", sys.stderr)
        return 2
    return run_server(settings, vars(arguments))


def run_server(settings: Settings, flags: Mapping[str, Any], cluster: ClusterEngines | None = None) -> int:
    """Runs a server until a signal stops it. Returns the exit code. flags: see `read_settings`."""
    set_up_logging(settings.log_format, "API", RequestFields(), mask=mask_keys)
    for unknown in explain_unknown_variables(os.environ):
        logger.warning("%s", unknown)
    try:
        settings, flags = with_local_model(settings, flags, lambda text: print_line(f"slora: {text}"))
        run_event_loop(_serve(settings, flags, cluster), FairEventLoop)
    except (SloraError, OSError, ValueError) as error:
        print_line(f"slora: {error}", sys.stderr)
        return 1
    return 0


@command(
    "demo",
    None,
    argument(
        "demo", nargs="?", metavar="DIR", help="another demo: a directory with model/ and adapters/NAME"
    ),
    setting_flags(server_setting_specs()),
    epilog=VARIABLES,
)
def serve_demo(arguments: argparse.Namespace) -> int:
    """Runs a server like `main`, with a demo: the one that is part of slora, unless another is given."""

    def tell(text: str) -> None:
        print_line(f"slora: {text}")

    try:
        if arguments.demo is None:
            demo, model = find_demo(tell)
        else:
            demo = Demo.read(Path(arguments.demo))
            model = demo.find_model(tell)
    except ConfigError as error:
        print_line(f"slora: {error}", sys.stderr)
        return 1
    arguments.demo = str(demo.directory)
    arguments.model = arguments.model or os.environ.get("SLORA_MODEL") or str(model)
    arguments.model_name = arguments.model_name or os.environ.get("SLORA_MODEL_NAME") or demo.model_name
    if demo.package is not None:
        arguments.dtype = arguments.dtype or os.environ.get("SLORA_DTYPE") or choose_dtype()
    return main(arguments)
