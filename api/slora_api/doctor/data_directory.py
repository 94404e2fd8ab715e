"""Checks the data directory and its secrets. Creates nothing in the directory except a temporary file."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from slora.byte_text import format_bytes
from slora_adapters.disk_reserve import RESERVE_BYTES
from slora_adapters.full_disk import has_space
from slora_api.data_dir import DataDir, find_lock_holder
from slora_api.doctor.file_system import find_file_system
from slora_api.doctor.finding import Finding, failure, fine, warning
from slora_api.doctor.server_probe import ServerProbe
from slora_api.doctor.shared_fact import SharedFact
from slora_api.settings import Settings
from slora_api.tenants.admin_key import explain_weak_key
from slora_api.tenants.api_key import Pepper

__all__ = ["check_data_directory", "check_directory", "check_secrets"]

_PROBE = b"slora doctor"


def check_data_directory(settings: Settings, server: SharedFact[ServerProbe]) -> Iterator[Finding]:
    path = Path(settings.data_dir).resolve()
    yield from check_directory(path, "--data-dir")
    if not path.is_dir():
        return
    if path.stat().st_uid != os.geteuid() and os.geteuid() != 0:
        yield failure(
            f"it belongs to user {path.stat().st_uid}, and this is user {os.geteuid()}",
            "run slora as its owner, or chown it",
        )
    holder = find_lock_holder(path)
    if holder is not None and not server.get().is_slora:
        yield failure(
            f"another slora server uses it ({holder})",
            "stop that server, or choose another --data-dir; if it is yours, give its --port",
        )
    file_system = find_file_system(path)
    if file_system.is_network and not settings.database:
        yield warning(
            f"SQLite is not safe on the network file system {file_system.kind}",
            "use a local disk, or PostgreSQL (--database)",
        )
    if file_system.is_memory:
        yield warning(
            f"it is in memory ({file_system.kind}), so tenants, keys and adapters are lost at a restart of the machine",
            "choose a --data-dir on a disk",
        )
    if file_system.is_container_layer:
        yield warning(
            "it is in a container's own layer, and is deleted with the container", "mount a volume there"
        )
    uploads = settings.max_concurrent_uploads * settings.max_upload_bytes
    free = shutil.disk_usage(path).free
    if not has_space(path, RESERVE_BYTES):
        yield failure(
            f"its disk is full ({format_bytes(free)} free): the server would be read-only", "free some space"
        )
    elif free < uploads + RESERVE_BYTES:
        yield warning(
            f"{format_bytes(free)} are free, but {settings.max_concurrent_uploads} uploads of "
            f"{format_bytes(settings.max_upload_bytes)} may be in progress",
            "free some space, or lower --max-upload-bytes",
        )
    else:
        yield fine(f"{format_bytes(free)} are free on {file_system.kind or 'an unknown file system'}")


def check_directory(path: Path, flag: str) -> Iterator[Finding]:
    """Checks that the server can create and write the directory, and that its disk syncs."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        yield failure(f"{existing} is not a directory", f"choose another {flag}")
        return
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        yield failure(
            f"user {os.geteuid()} may not write in {existing}", f"chown or chmod it, or choose another {flag}"
        )
        return
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield failure(f"{existing} cannot be written and synced ({error.strerror})", f"choose another {flag}")
        return
    if existing == path:
        yield fine(f"{path} can be written and synced")
    else:
        yield fine(f"{path} does not exist yet, and can be created")


def check_secrets(settings: Settings, flags: Mapping[str, str | None]) -> Iterator[Finding]:
    """Checks that only the server's owner can read its secrets. flags: the flags of the command line, which other users
    of the machine can see.
    """
    data = DataDir(Path(settings.data_dir).resolve())
    if data.path.is_dir() and _is_open(data.path):
        yield warning(
            f"other users may read {data.path} until the server starts and closes it",
            f"chmod 700 {data.path}",
        )
    num_files = 0
    for path in (data.pepper, data.admin_key, data.demo_keys):
        if not path.exists():
            continue
        num_files += 1
        if not os.access(path, os.R_OK):
            yield failure(f"user {os.geteuid()} may not read {path}", "run slora as its owner, or chown it")
        elif _is_open(path):
            yield warning(f"other users may read {path}", f"chmod 600 {path}")
    if data.pepper.exists() and os.access(data.pepper, os.R_OK):
        Pepper.from_file(data.pepper)
    elif data.database.exists() and not settings.database and not data.pepper.exists():
        yield failure(
            f"{data.pepper} is missing beside the database, so no API key can be checked",
            "restore the file from a backup",
        )
    if settings.admin_key and (weakness := explain_weak_key(settings.admin_key)):
        yield warning(weakness)
    for name in ("admin_key", "database", "redis", "quota_redis", "store"):
        if (given := flags.get(name)) and (name == "admin_key" or _has_password(given)):
            flag = "--" + name.replace("_", "-")
            yield warning(f"other users of the machine can see {flag}", f"set SLORA_{name.upper()} instead")
    if not num_files:
        yield fine("none yet; the first start creates them")
    else:
        yield fine(f"{num_files} files with secrets, which only their owner may read")


def _is_open(path: Path) -> bool:
    """Returns whether any user other than the owner has a permission on the file."""
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def _has_password(url: str) -> bool:
    return "://" in url and bool(urlsplit(url).password)
