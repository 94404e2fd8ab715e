"""The child processes that `slora serve` supervises, with their arguments and environments."""

import json
import os
from dataclasses import asdict
from typing import Any

from slora_adapters.loader.loader_config import LoaderConfig
from slora_api.data_dir import DataDir
from slora_api.server.base_model_files import BaseModelFiles
from slora_api.server.child_environment import ENGINE_VARIABLES, LOADER_VARIABLES, pass_on
from slora_api.server.sockets import Sockets
from slora_api.server.supervisor import Child
from slora_api.settings import Settings

__all__ = ["engines_and_loader", "store_url"]


def store_url(settings: Settings, data: DataDir) -> str:
    return settings.store or str(data.adapters)


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def engines_and_loader(
    settings: Settings, model: BaseModelFiles, data: DataDir, sockets: Sockets
) -> list[Child]:
    engine: dict[str, Any] = {
        "loader_socket": str(sockets.loader),
        "usage_directory": str(data.usage),
        "engine": asdict(settings.engine) | {"model": str(model.directory), "model_name": model.name},
    }
    loader = LoaderConfig(
        socket=sockets.loader,
        store=store_url(settings, data),
        warm=settings.redis or None,
        shape=model.shape,
        dtype=model.dtype,
        host_cache_bytes=settings.host_cache_bytes,
        max_lora_rank=settings.engine.max_lora_rank,
        num_ranks=settings.engine.tensor_parallel_size,
    )
    return [
        # The arguments are passed in a file, because the URLs of the stores may contain passwords, and every user of
        # the machine can read a command line.
        Child(
            "loader",
            "slora_adapters.loader.loader_process",
            ["--log-format", settings.log_format, data.write_arguments("--config", loader.to_json())],
            pass_on(os.environ, (*LOADER_VARIABLES, *_split_names(settings.store_environment))),
            waits_for_others=True,
        ),
        *(
            Child(
                path.stem,
                "slora.engine.process",
                [
                    "--log-format",
                    settings.log_format,
                    "--config",
                    json.dumps({"socket": str(path), **engine}),
                ],
                share_machine(
                    pass_on(os.environ, ENGINE_VARIABLES),
                    number,
                    settings.replicas,
                    settings.engine.tensor_parallel_size,
                ),
            )
            for number, path in enumerate(sockets.engines)
        ),
    ]


def share_machine(
    environment: dict[str, str], number: int, num_replicas: int, num_gpus: int = 1
) -> dict[str, str]:
    """Returns the environment of one engine, with its share of the cores and GPUs of its own.

    num_gpus: of each engine. An operator's OMP_NUM_THREADS takes precedence. Without GPUs, their numbers have no effect.
    """
    if num_replicas == 1:
        return environment
    cores = sorted(os.sched_getaffinity(0))
    num_threads = max(1, len(cores) // num_replicas)
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else list(map(str, range(num_replicas * num_gpus)))
    own = {"OMP_NUM_THREADS": str(num_threads), **environment}
    return {**own, "CUDA_VISIBLE_DEVICES": ",".join(devices[number * num_gpus :][:num_gpus])}
