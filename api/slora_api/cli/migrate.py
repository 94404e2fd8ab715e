"""`slora migrate`: copies a registry that release 0.1 kept in Redis into the database."""

import argparse
import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from slora.errors import SloraError
from slora_adapters.database.database import Database
from slora_adapters.store.store_url import load_optional
from slora_api.data_dir import open_data_dir

__all__ = ["migrate"]


def migrate(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    registry: str | None = arguments.registry or os.environ.get("SLORA_REGISTRY") or None
    if registry is None:
        print(
            "slora: --registry is missing; give the URL of the Redis that has the registry", file=sys.stderr
        )
        return 2
    try:
        num_names = _copy(registry, arguments)
    except (SloraError, OSError, ValueError) as error:
        print(f"slora: {error}", file=sys.stderr)
        return 1
    if num_names is None:
        print("the database has this registry already; nothing was changed")
    else:
        print(f"copied {num_names} names with their versions and aliases; Redis was not changed")
    return 0


def _copy(registry: str, arguments: argparse.Namespace) -> int | None:
    copy_registry = load_optional("registry.redis_registry", "redis", "the registry").copy_registry
    with ExitStack() as stack:
        place: str | Path = arguments.database or os.environ.get("SLORA_DATABASE", "")
        if not place:
            directory = arguments.data_dir or os.environ.get("SLORA_DATA_DIR") or "data"
            # The lock of the directory: no server uses the file in the meantime.
            place = stack.enter_context(open_data_dir(Path(directory))).database
        num_names: int | None = copy_registry(registry, stack.enter_context(closing(Database(place))))
        return num_names
