"""`slora migrate`: copies data into the database, either from the Redis registry of release 0.1 or from the SQLite
database of a data directory.
"""

import argparse
from contextlib import ExitStack, closing
from pathlib import Path

from slora.errors import SloraError
from slora_adapters.database.audit_log import acting_as, command_actor
from slora_adapters.database.database import Database
from slora_adapters.database.database_copy import copy_database
from slora_adapters.store.store_url import load_optional
from slora_api.cli.local_setting import read_local_setting
from slora_api.cli.remote import CommandFailed, explained
from slora_api.data_dir import open_data_dir
from slora_api.tenants.api_key import Pepper
from slora_api.tenants.key_store import KeyStore
from slora_api.tenants.revocation_journal import RevocationJournal

__all__ = ["migrate"]


@explained
def migrate(arguments: argparse.Namespace) -> None:
    registry = read_local_setting(arguments, "registry")
    database, directory = read_local_setting(arguments, "database"), read_local_setting(arguments, "data_dir")
    if not registry and not (database and directory):
        arguments.refuse(
            "give --registry to copy from Redis, or --data-dir and --database to copy from a file"
        )
    try:
        with ExitStack() as stack, acting_as(command_actor()):
            if database:
                target = stack.enter_context(closing(Database(database)))
                if directory and ((Path(directory) / "slora.db").exists() or not registry):
                    _copy_data_dir(Path(directory), target)
            else:
                # Opening the directory locks it, so that no server uses the file meanwhile.
                data = stack.enter_context(open_data_dir(Path(directory or "data")))
                target = stack.enter_context(closing(Database(data.database)))
            if registry:
                _copy_registry(registry, target)
    except (SloraError, OSError, ValueError) as error:
        raise CommandFailed(str(error)) from error


def _copy_data_dir(directory: Path, target: Database) -> None:
    if not (directory / "slora.db").exists():
        raise CommandFailed(f"{directory} has no slora.db, so there is nothing to copy: check --data-dir")
    with (
        open_data_dir(directory) as data,
        closing(Database(data.database)) as source,
        closing(RevocationJournal(data.revocations)) as journal,
    ):
        # Write the check value of the pepper and the pending revocations to the source, so that both are copied.
        KeyStore(source, Pepper.from_file(data.pepper), journal).write_pending_revocations()
        copied = copy_database(source, target)
    print(
        f"copied {copied.num_tenants} tenants, {copied.num_keys} keys and {copied.num_names} names from {directory}; "
        "what the database had already was not changed"
    )


def _copy_registry(registry: str, target: Database) -> None:
    copy_registry = load_optional(
        "slora_adapters.registry.redis_registry", "redis", "the registry"
    ).copy_registry
    num_names: int | None = copy_registry(registry, target)
    if num_names is None:
        print("the registry in Redis was already copied to the database")
    else:
        print(f"copied {num_names} names with their versions and aliases from Redis, which was not changed")
