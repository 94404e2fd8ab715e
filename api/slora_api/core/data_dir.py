"""The data directory of a server, and the lock that prevents two servers from using it at once."""

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slora.core.errors import SloraError
from slora_adapters.process.full_disk import is_full
from slora_api.core.settings import Settings

logger = logging.getLogger(__name__)

_LOCK = "server.lock"
_URL = "server.url"
# Lists all locks that this process can see. See proc_locks(5).
_LOCKS = Path("/proc/locks")


class DataDirInUse(SloraError):
    """Another server uses this data directory."""


class DataDirUnusable(SloraError):
    """The data directory cannot be created or written."""


@dataclass(frozen=True, slots=True)
class DataDir:
    """The paths of the files below the data directory."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / "slora.db"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def pepper(self) -> Path:
        return self.path / "pepper"

    @property
    def admin_key(self) -> Path:
        return self.path / "admin-key.hmac"

    @property
    def unseen_admin_key(self) -> Path:
        """A generated admin key in the clear, until it was shown on a terminal or the operator deletes the file."""
        return self.path / "admin-key"

    @property
    def revocations(self) -> Path:
        return self.path / "revocations"

    @property
    def usage(self) -> Path:
        return self.path / "usage"

    @property
    def quotas(self) -> Path:
        """The quota counters of this host."""
        return self.path / "run" / "quotas"

    @property
    def history(self) -> Path:
        """The health of this host in the last 24 hours."""
        return self.path / "history"

    @property
    def reserve(self) -> Path:
        return self.path / "reserve"

    @property
    def kernels(self) -> Path:
        """Compiled kernels, if neither the installation nor the user's cache can be written."""
        return self.path / "kernels"

    def advertise(self, url: str) -> None:
        """Writes where the server listens, for commands that do not find it; see `find_running_url`."""
        with suppress(OSError):  # A full disk must not prevent the start.
            (self.path / _URL).write_text(url, encoding="utf-8")

    @property
    def demo_keys(self) -> Path:
        return self.path / "demo-keys.json"


@contextmanager
def open_data_dir(path: Path) -> Iterator[DataDir]:
    """Creates the directory (mode 0700) and holds its lock for the duration of the context. Raises DataDirInUse, and
    DataDirUnusable if this user cannot create the directory or write to it.
    """
    path = path.resolve()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
        # The kernel releases the lock when the process ends, even by kill -9. A lock file by itself would remain.
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DataDirUnusable(
            f"--data-dir is {str(path)!r}, which this server cannot use: {error.strerror}. Choose a directory that its "
            "user owns or can create"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirInUse(
                f"{path} is in use by another slora server ({_read_owner(path)}); stop it, or choose another --data-dir"
            ) from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            # A full disk must not prevent the start, because the process id is only shown in error messages.
            if not is_full(error):
                raise
        yield DataDir(path)
    finally:
        os.close(descriptor)


def ensure_temporary_directory(data: DataDir) -> None:
    """If no directory for temporary files can be written, this process and its children use the data directory."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        directory = data.path / "tmp"
        directory.mkdir(mode=0o700, exist_ok=True)
        tempfile.tempdir = os.environ["TMPDIR"] = str(directory)
        logger.warning("%s; temporary files are in %s", error.strerror, directory)


def find_running_url(path: Path) -> str | None:
    """Returns where the server that uses the directory listens; None if no server uses it."""
    try:
        return None if find_lock_holder(path) is None else (path / _URL).read_text("utf-8")
    except OSError:
        return None


def find_lock_holder(path: Path) -> str | None:
    """Returns the process that holds the lock of the directory, as text; None if the lock is free. Does not take the
    lock to test it, because a server that starts at that moment would be refused.
    """
    try:
        inode = (path / _LOCK).stat().st_ino
    except FileNotFoundError:
        return None
    fields = (line.split() for line in _LOCKS.read_text(encoding="utf-8").splitlines())
    held = {one[5].rpartition(":")[2] for one in fields if len(one) > 5 and one[1] == "FLOCK"}
    return _read_owner(path) if str(inode) in held else None


def _read_owner(path: Path) -> str:
    return f"process {(path / _LOCK).read_text(encoding='utf-8')[:32].strip() or 'unknown'}"


def store_url(settings: Settings, data: DataDir) -> str:
    return settings.store or str(data.adapters)
