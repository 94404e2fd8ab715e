"""The child processes that `slora serve` supervises, with their arguments and environments."""

import asyncio
import json
import logging
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slora.core.errors import ConfigError
from slora_adapters.loader.loader_process import LoaderConfig
from slora_adapters.process.children import BASE_VARIABLES, ENGINE_VARIABLES, LOADER_VARIABLES, pass_on
from slora_adapters.process.durable_file import replace_durably
from slora_adapters.process.full_disk import is_full
from slora_api.adapters.base_model import BaseModelFiles
from slora_api.core.data_dir import DataDir, store_url
from slora_api.core.package_version import is_installed
from slora_api.core.settings import Settings, choose_host_cache_bytes
from slora_api.processes.supervisor import Child
from slora_kernels.kernel_cache import FALLBACK_VARIABLE
from slora_kernels.machine_limits import machine_limits

logger = logging.getLogger(__name__)

# Linux's limit for the path of a Unix socket, in bytes, without the terminating zero byte.
_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class Sockets:
    """The Unix sockets of the child processes. num_engines: one or more."""

    directory: Path
    num_engines: int = 1

    @property
    def engines(self) -> list[Path]:
        """The socket of each engine. Its stem is the name of the engine process in logs and metrics."""
        if self.num_engines == 1:
            return [self.directory / "engine.sock"]
        return [self.directory / f"engine-{number}.sock" for number in range(self.num_engines)]

    @property
    def loader(self) -> Path:
        return self.directory / "loader.sock"

    def write_arguments(self, *arguments: str) -> str:
        """Writes the loader's arguments to a file that only the owner can read, one per line. Returns the argument that
        names the file.
        """
        path = self.directory / "loader.arguments"
        replace_durably(path, "\n".join(arguments).encode())
        return f"@{path}"


def open_sockets(stack: AsyncExitStack, data: DataDir, num_engines: int = 1) -> Sockets:
    """Returns the paths of the sockets.

    They are in the data directory if its path is short enough and its disk has room, else in a temporary directory. A
    kill -9 leaves the temporary directory behind.
    """
    sockets = Sockets(data.path / "run", num_engines)
    if len(os.fsencode(sockets.engines[-1])) > _SOCKET_PATH_BYTES:
        return Sockets(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-"))), num_engines)
    try:
        sockets.directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if not is_full(error):
            raise
        return Sockets(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-"))), num_engines)
    # Remove the sockets of a killed server. Its children may still run for a moment and must not be mistaken for ours.
    for stale in (*sockets.engines, sockets.loader):
        stale.unlink(missing_ok=True)
    return sockets


# The modules of the processes that read untrusted input. They start with the first such input.
_SANDBOX_MODULES = (
    "slora_api.sandbox.template_process",
    "slora_api.sandbox.grammar_process",
    "slora_adapters.inspection.inspection_process",
)
# The name of this part of the start in `Obstacles.unfinished`.
SANDBOXES = "sandboxes"
_GRAMMAR_LIBRARY = "llguidance"
_SANDBOX_START_S = 120.0
_SANDBOX_PAUSE_S = 5.0


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def engines_and_loader(
    settings: Settings, model: BaseModelFiles, data: DataDir, sockets: Sockets
) -> list[Child]:
    limits = machine_limits()
    environment = pass_on(os.environ, ENGINE_VARIABLES)
    if settings.replicas > 1 and limits.num_threads < len(limits.cores):
        # Each engine sees the whole CPU quota of the control group, so it cannot know that it has a part.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, limits.num_threads // settings.replicas)))
    return [
        loader(settings, model, sockets, store_url(settings, data)),
        *(
            engine(
                settings,
                model,
                sockets,
                data,
                EnginePlace(
                    path.stem,
                    {"socket": str(path)},
                    choose_gpus(environment, number, settings.replicas, settings.engine.tensor_parallel_size)
                    if settings.engine.device != "cpu"
                    else environment,
                    cores=choose_cores(limits.cores, number, settings.replicas),
                ),
            )
            for number, path in enumerate(sockets.engines)
        ),
    ]


def loader(settings: Settings, model: BaseModelFiles, sockets: Sockets, store: str) -> Child:
    config = LoaderConfig(
        socket=sockets.loader,
        store=store,
        warm=settings.redis or None,
        shape=model.shape,
        dtype=model.dtype,
        host_cache_bytes=choose_host_cache_bytes(settings),
        max_lora_rank=settings.engine.max_lora_rank,
        num_ranks=settings.engine.tensor_parallel_size,
    )
    # The arguments are passed in a file, because the URLs of the stores may contain passwords, and every user of the
    # machine can read a command line.
    return Child(
        "loader",
        "slora_adapters.loader.loader_process",
        ["--log-format", settings.log_format, sockets.write_arguments("--config", config.to_json())],
        pass_on(os.environ, (*LOADER_VARIABLES, *_split_names(settings.store_environment))),
        waits_for_others=True,
    )


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where one engine runs and listens."""

    name: str  # of the engine process in logs and metrics
    listens: Mapping[str, Any]  # as fields of its `ProcessConfig`
    environment: Mapping[str, str]
    descriptors: tuple[int, ...] = ()  # those that it inherits
    cores: Collection[int] = ()  # those that it may use; empty: all


def engine(
    settings: Settings, model: BaseModelFiles, sockets: Sockets, data: DataDir, place: EnginePlace
) -> Child:
    config = {
        **place.listens,
        "loader_socket": str(sockets.loader),
        "usage_directory": str(data.usage),
        "engine": asdict(settings.engine) | {"model": str(model.directory), "model_name": model.name},
    }
    return Child(
        place.name,
        "slora.engine.process",
        ["--log-format", settings.log_format, "--config", json.dumps(config)],
        {**place.environment, FALLBACK_VARIABLE: str(data.kernels)},
        descriptors=place.descriptors,
        cores=place.cores,
    )


async def _try_sandboxes() -> str | None:
    """Starts a process that imports what the sandboxes and inspections need, in their environment. Returns why it
    failed, or None.
    """
    modules = [*_SANDBOX_MODULES, *([_GRAMMAR_LIBRARY] if is_installed(_GRAMMAR_LIBRARY) else [])]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", "import " + ", ".join(modules),
        stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, env=pass_on(os.environ, BASE_VARIABLES),
    )  # fmt: skip
    try:
        async with asyncio.timeout(_SANDBOX_START_S):
            _, errors = await process.communicate()
    except TimeoutError:
        return f"it did not start within {_SANDBOX_START_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return None
    return (errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]


async def await_sandboxes(unfinished: dict[str, str], pause_s: float = _SANDBOX_PAUSE_S) -> None:
    """Tries the sandboxes until they work. Until then, `unfinished` says why the server is not ready.

    pause_s: the seconds between two tries.
    """
    while (trouble := await _try_sandboxes()) is not None:
        unfinished[SANDBOXES] = f"the processes for uploads, chat templates and forms do not start: {trouble}"
        logger.error("%s; trying again in %g s", unfinished[SANDBOXES], pause_s)
        await asyncio.sleep(pause_s)
    unfinished.pop(SANDBOXES, None)


def choose_gpus(
    environment: dict[str, str], number: int, num_replicas: int, num_gpus: int = 1
) -> dict[str, str]:
    """Returns the environment of one engine, with GPUs of its own. num_gpus: of each engine.

    An operator's CUDA_VISIBLE_DEVICES is divided among the engines. Raises ConfigError if it has too few devices. An
    empty value hides all GPUs from all engines. On a machine without GPUs, the result has no effect.
    """
    num_needed = num_replicas * num_gpus
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if num_replicas == 1 or visible == "":
        return environment
    devices = list(map(str, range(num_needed))) if visible is None else visible.split(",")
    if len(devices) < num_needed:
        ranks = f" with --tensor-parallel-size {num_gpus}" if num_gpus > 1 else ""
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible} has {len(devices)} devices, but --replicas {num_replicas}{ranks} needs "
            f"{num_needed}: name more devices, or use fewer replicas, or use --device cpu"
        )
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(devices[number * num_gpus :][:num_gpus])}


def choose_cores(cores: Sequence[int], number: int, num_replicas: int) -> Sequence[int]:
    """Returns the cores of one engine; empty if it is not bound to cores. Torch starts one thread for each.

    Worked example: 7 cores and 3 engines. Engine 0 gets 2 cores, engine 1 gets 2 and engine 2 gets 3.
    """
    if num_replicas == 1 or len(cores) < num_replicas:
        return ()
    return cores[number * len(cores) // num_replicas : (number + 1) * len(cores) // num_replicas]
