"""`slora backup` and `slora restore`. They work directly on the database and the store, whether or not a server is
running.

Reads server settings for commands that work on the server's data directly.
"""

import argparse
import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from slora.core.errors import SloraError
from slora_adapters.backup.backup import make_backup
from slora_adapters.backup.restore import restore_backup
from slora_adapters.database.audit_log import acting_as, command_actor
from slora_adapters.database.database import Database
from slora_adapters.store.store_url import open_store
from slora_api.cli.declaration import argument, command
from slora_api.cli.remote import CommandFailed, explained
from slora_api.core.data_dir import DataDir
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import Pepper
from slora_api.keys.key_store import KeyStore, RevocationJournal


@command(
    "backup",
    None,
    argument("directory", metavar="DIR", help="the backup; it must not exist"),
    argument(
        "--previous",
        metavar="BACKUP",
        help="an earlier backup; weights that it has are linked instead of copied",
    ),
    argument("--data-dir", metavar="DIR", help="data directory of a server (SLORA_DATA_DIR; default data)"),
    argument("--database", metavar="URL", help="as in slora serve (SLORA_DATABASE)"),
    argument("--store", metavar="URL", help="as in slora serve (SLORA_STORE)"),
    epilog="The directory contains the pepper of all API keys. Keep it as safe as the servers.",
)
@explained
def backup(arguments: argparse.Namespace) -> None:
    data = DataDir(Path(read_local_setting(arguments, "data_dir") or "data").resolve())
    place = read_local_setting(arguments, "database")
    if not data.pepper.exists() or not (place or data.database.exists()):
        raise CommandFailed(
            f"{data.path} is not the data directory of a server: check --data-dir, and give --database if the server "
            "has one"
        )
    target = Path(arguments.directory).resolve()
    try:
        with ExitStack() as stack, acting_as(command_actor()):
            database = stack.enter_context(closing(Database(place or data.database)))
            store = stack.enter_context(
                closing(open_store(read_local_setting(arguments, "store") or str(data.adapters)))
            )
            journal = stack.enter_context(closing(RevocationJournal(data.revocations)))
            # Without this, restoring the backup would revive keys whose revocation is not in the database yet.
            keys = KeyStore(database, Pepper.from_file(data.pepper), journal)
            KeyAdmin(keys).write_pending_revocations()
            manifest = make_backup(
                database,
                store,
                {path.name: path for path in (data.pepper, data.admin_key)},
                target,
                Path(arguments.previous).resolve() if arguments.previous else None,
            )
    except (SloraError, OSError, ValueError) as error:
        raise CommandFailed(f"no backup was made: {error}") from error
    num_bytes = sum(file.num_bytes for file in manifest.files.values())
    print(f"backed up {len(manifest.digests)} blobs and the database, {num_bytes} bytes in all, to {target}")
    print(f"{target} contains the pepper of all API keys: keep it as safe as the servers", file=sys.stderr)


@command(
    "restore",
    None,
    argument("directory", metavar="BACKUP"),
    argument(
        "--data-dir",
        required=True,
        metavar="DIR",
        help="the data directory to make; if it exists, it must be empty",
    ),
    argument("--database", metavar="URL", help="an empty PostgreSQL database for tenants, keys and names"),
    argument("--store", metavar="URL", help="a store for the adapters, as in slora serve"),
)
@explained
def restore(arguments: argparse.Namespace) -> None:
    if arguments.database and not arguments.store:
        arguments.refuse(
            "--database is shared by several hosts: give the --store that all of them can reach, too"
        )
    data_dir = Path(arguments.data_dir).resolve()
    try:
        with ExitStack() as stack, acting_as(command_actor()):
            database = store = None
            if arguments.database:
                database = stack.enter_context(closing(Database(arguments.database)))
            if arguments.store:
                store = stack.enter_context(closing(open_store(arguments.store)))
            manifest = restore_backup(Path(arguments.directory).resolve(), data_dir, database, store)
    except (SloraError, OSError, ValueError) as error:
        raise CommandFailed(f"nothing was restored: {error}") from error
    print(f"restored {len(manifest.digests)} blobs and the database to {data_dir}")


def read_local_setting(arguments: argparse.Namespace, name: str) -> str:
    """Returns the value of a server setting from its flag, or else from its environment variable; empty if neither is
    set.
    """
    return getattr(arguments, name) or os.environ.get(f"SLORA_{name.upper()}", "")
