"""Finds the file system of a directory."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileSystem", "find_file_system"]

_NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "beegfs",
        "gpfs",
        "ocfs2",
        "gfs2",
    }
)
# Network file systems in user space (FUSE). All other FUSE file systems, such as ntfs-3g, are local.
_NETWORK_FUSE = frozenset(
    {"fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.ceph", "fuse.rclone"}
)
_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A file system. kind: its type as in mount(8), such as `ext4`; empty if the type is not known."""

    kind: str

    @property
    def is_network(self) -> bool:
        return self.kind in _NETWORK | _NETWORK_FUSE

    @property
    def is_memory(self) -> bool:
        return self.kind in _MEMORY

    @property
    def is_container_layer(self) -> bool:
        return self.kind == "overlay"


def find_file_system(path: Path, table: Path = Path("/proc/self/mountinfo")) -> FileSystem:
    """Returns the file system of a path. path: an absolute path without symbolic links. table: the list of mounts, in
    the format of proc(5).
    """
    best, kind = -1, ""
    for line in table.read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5:
            continue
        # The table contains spaces and other separators as octal escapes.
        point = Path(fields[4].encode().decode("unicode_escape"))
        # Of several mounts at the same path, the last one hides the others.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    return FileSystem(kind)
