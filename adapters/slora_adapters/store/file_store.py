"""A durable store in a directory of local files.

    blobs/ab/ab12.../      one folder per digest, complete from the moment it exists
    tmp/...                blobs that are being written, and blobs that are being deleted
    claims/<registry>      an empty file for each registry that refers to blobs here

A blob is written to a folder in tmp. All its files and the folder are synced to disk, and the folder is then renamed
into place. So after a crash of the process or the machine, a blob is either complete or absent. A writer locks its
folder, and the kernel releases the lock when the writer dies. Opening the store removes the unlocked folders in tmp.
"""

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slora_adapters.errors import AdapterNotFound, DiskFull, StoreUnavailable, TryAgain
from slora_adapters.process.durable_file import sync_directory
from slora_adapters.process.full_disk import is_full
from slora_adapters.store.store import Blob, check_digest, check_member_name, is_digest

TIER = "file"


class LocalBlob:
    """Implements `store.Blob`. Open files stay readable when they are deleted or replaced. The constructor raises
    OSError.

    Files are read instead of mapped, because an I/O error in a mapping kills the process. Reading is not slower: the
    page cache was read at 13 GB/s into reused memory, and at 1.3 GB/s into memory that is touched for the first time.
    """

    tier = next_tier = TIER

    def __init__(self, members: Mapping[str, Path | bytes]) -> None:
        self.members: dict[str, int] = {}
        self._contents: dict[str, bytes | int] = {}  # the content itself, or the descriptor of a file
        self._closing = ExitStack()
        try:
            for name, content in members.items():
                self._contents[name] = content if isinstance(content, bytes) else self._open(content)
                self.members[name] = self._measure(name)
        except BaseException:
            self.close()
            raise

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        content = self._contents[name]
        if isinstance(content, bytes):
            buffer[:] = content[start : start + len(buffer)]
            return
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(content, [buffer[done:]], start + done)
                if not count:
                    raise StoreUnavailable(f"member {name!r} is truncated: it ends at byte {start + done}")
                done += count
        except OSError as error:
            raise StoreUnavailable(f"member {name!r} cannot be read: {error}") from error

    def close(self) -> None:
        self._closing.close()

    def _open(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._closing.callback(os.close, descriptor)
        return descriptor

    def _measure(self, name: str) -> int:
        content = self._contents[name]
        return len(content) if isinstance(content, bytes) else os.fstat(content).st_size


# Maximum number of attempts of one put. A put starts again if the same digest was deleted meanwhile.
_MAX_ATTEMPTS = 10
# Bytes that `copy` reads at once.
_PIECE_BYTES = 4 << 20


class FileStore:
    """Implements `store.Store` with local files. Several processes may share the directory.

    The constructor raises StoreUnavailable if the directory cannot be used. It creates a missing root with mode 0700,
    and does not change the mode of an existing one.
    """

    tiers = (TIER,)

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self._blobs = self.root / "blobs"
        self._tmp = self.root / "tmp"
        self._claims = self.root / "claims"
        with _as_unavailable(self.root):
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._blobs.mkdir(exist_ok=True)
            self._tmp.mkdir(exist_ok=True)
            self._claims.mkdir(exist_ok=True)
            sync_directory(self.root)
            _sweep(self._tmp)

    def put(self, digest: str, members: Mapping[str, Path | bytes]) -> None:
        check_digest(digest)
        for name in members:
            check_member_name(name)
        with _as_unavailable(self.root):
            for _ in range(_MAX_ATTEMPTS):
                with locked_folder(self._tmp) as folder:
                    for name, content in members.items():
                        _write_member(folder / name, content)
                    sync_directory(folder)
                    if self._publish(folder, digest):
                        return
        raise TryAgain(
            f"adapter {digest[:12]} was deleted during each of {_MAX_ATTEMPTS} attempts to store it; try "
            "again"
        )

    def copy(
        self,
        digest: str,
        blob: Blob,
        on_piece: Callable[[str, memoryview], None] = lambda member, piece: None,
    ) -> None:
        """Like `put`, with the content of a blob from another store. on_piece: called with each piece of each member,
        in order. Raises what reading that blob raises.
        """
        check_digest(digest)
        with _as_unavailable(self.root), locked_folder(self._tmp) as folder:
            for name, num_bytes in blob.members.items():
                with (folder / check_member_name(name)).open("wb") as file:
                    for start in range(0, num_bytes, _PIECE_BYTES):
                        piece = memoryview(bytearray(min(_PIECE_BYTES, num_bytes - start)))
                        blob.read_into(name, start, piece)
                        file.write(piece)
                        on_piece(name, piece)
                    file.flush()
                    os.fsync(file.fileno())
            sync_directory(folder)
            self._publish(folder, digest)

    def open(self, digest: str) -> LocalBlob:
        with _as_unavailable(self.root):
            try:
                return LocalBlob({path.name: path for path in sorted(self._folder(digest).iterdir())})
            except FileNotFoundError:
                self._check_there()
                raise AdapterNotFound(f"the store has no adapter {digest[:12]}") from None

    def exists(self, digest: str) -> bool:
        with _as_unavailable(self.root):
            if self._folder(digest).exists():
                return True
            self._check_there()
            return False

    def delete(self, digest: str) -> None:
        with _as_unavailable(self.root):
            trash = self._tmp / uuid.uuid4().hex
            try:
                os.rename(self._folder(digest), trash)
            except FileNotFoundError:
                self._check_there()
                return
            sync_directory(self._folder(digest).parent)
            shutil.rmtree(trash, ignore_errors=True)

    def report_corrupt(self, digest: str) -> bool:
        """Returns False, because the store has only one copy."""
        return False

    def digests(self) -> Iterator[str]:
        with _as_unavailable(self.root):
            folders = [path for shard in self._blobs.iterdir() for path in shard.iterdir()]
        return (path.name for path in folders if is_digest(path.name))

    def claim(self, registry: str) -> None:
        with _as_unavailable(self.root):
            (self._claims / registry).touch()
            sync_directory(self._claims)

    def claims(self) -> frozenset[str]:
        with _as_unavailable(self.root):
            return frozenset(path.name for path in self._claims.iterdir())

    def check(self) -> None:
        """Raises StoreUnavailable unless the directory exists and is writable."""
        if not os.access(self._tmp, os.W_OK):
            raise StoreUnavailable(f"the store's folder {str(self._tmp)!r} is missing or not writable")

    def close(self) -> None:
        """Does nothing, because the store keeps nothing open."""

    def _check_there(self) -> None:
        """Raises StoreUnavailable if the store itself is missing, for example because its disk is not mounted."""
        if not self._tmp.is_dir():
            raise StoreUnavailable(
                f"the store in {str(self.root)!r} no longer exists; check that its disk is mounted"
            )

    def _folder(self, digest: str) -> Path:
        return self._blobs / digest[:2] / check_digest(digest)

    def _publish(self, folder: Path, digest: str) -> bool:
        """Moves a complete folder into place. Returns False if the existing blob was deleted while it was being
        replaced.
        """
        place = self._folder(digest)
        place.parent.mkdir(exist_ok=True)
        sync_directory(self._blobs)
        try:
            os.rename(folder, place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return _replace_members(folder, place)
        sync_directory(place.parent)
        return True


def _replace_members(folder: Path, place: Path) -> bool:
    """Replaces each member atomically. Blobs of one digest are interchangeable, so a reader may see old and new members
    mixed.
    """
    try:
        for member in folder.iterdir():
            os.replace(member, place / member.name)
        sync_directory(place)
    except FileNotFoundError:
        return False
    return True


def _write_member(path: Path, content: Path | bytes) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        shutil.copyfile(content, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def locked_folder(parent: Path) -> Iterator[Path]:
    """Yields a new folder that no sweep removes while this process lives. The folder is removed at the end if it still
    exists.
    """
    while True:
        folder = parent / uuid.uuid4().hex
        folder.mkdir()
        lock = _try_lock(folder)
        if lock is not None:
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Returns a descriptor that locks the folder; None if another process holds the lock or has just removed the
    folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink > 0 and folder.exists():
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _sweep(tmp: Path) -> None:
    for folder in tmp.iterdir():
        lock = _try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


@contextmanager
def _as_unavailable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise DiskFull(root) from error
        raise StoreUnavailable(f"the store in {str(root)!r} cannot be used: {error}") from error
