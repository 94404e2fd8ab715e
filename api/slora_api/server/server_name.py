"""A name for this server that no other running server has. It is kept in the data directory across restarts.

In a registry that several hosts share, a server that starts ends the leases that an earlier process of the same name
left behind. Two running servers with one name would end each other's leases, so a copied data directory must not keep
its name. The name is therefore stored with its place: the machine's id and the inode of the directory. A copied
directory has another place and gets a new name. A new name is always safe, because leases of the old name expire.
"""

import socket
import uuid
from pathlib import Path

from slora_adapters.durable_file import replace_durably
from slora_adapters.full_disk import is_full

__all__ = ["read_server_name"]

_MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def read_server_name(path: Path) -> str:
    """Returns the name stored in the file, or a new one. The caller holds the lock of the data directory."""
    place = _describe_place(path.parent)
    try:
        name, stored_place = path.read_text().split("\n")
    except (FileNotFoundError, ValueError):
        # Earlier releases stored no place, so such a file may be a copy.
        name, stored_place = "", ""
    if stored_place != place:
        name = uuid.uuid4().hex
        try:
            replace_durably(path, f"{name}\n{place}".encode())
        except OSError as error:
            # On a full disk, a name for this run only is good enough: a new name is always safe.
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
