"""A name that no other running server has, kept in the data directory across restarts.

A registry that several hosts share ends what an earlier process of the same name left undone. Two running servers with
one name would end each other's work, so a copy of a data directory must not keep the name. The name is therefore stored
with the place where it was made: the machine's id and the inode of the directory. A copied directory has another place,
and gets a new name. A new name is always safe: what the old one left undone expires by itself.
"""

import socket
import uuid
from pathlib import Path

from slora_adapters.durable_file import replace_durably
from slora_adapters.full_disk import is_full

__all__ = ["read_server_name"]

_MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def read_server_name(path: Path) -> str:
    """The name stored in the file, or a new one. The caller holds the lock of the data directory."""
    place = _describe_place(path.parent)
    try:
        name, stored_place = path.read_text().split("\n")
    except (FileNotFoundError, ValueError):
        # Earlier releases stored no place; such a file may be a copy.
        name, stored_place = "", ""
    if stored_place != place:
        name = uuid.uuid4().hex
        try:
            replace_durably(path, f"{name}\n{place}".encode())
        except OSError as error:
            # A name that lasts for this run only is as good: see above.
            if not is_full(error):
                raise
    return name


def _describe_place(directory: Path) -> str:
    return f"{_read_machine_id()}/{directory.stat().st_ino}"


def _read_machine_id() -> str:
    for path in _MACHINE_IDS:
        try:
            if machine_id := path.read_text().strip():
                return machine_id
        except OSError:
            continue
    return socket.gethostname()
