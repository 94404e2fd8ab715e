"""A durable store in any filesystem that fsspec supports: S3, Google Cloud Storage, Azure, SFTP, ...

Such filesystems have no atomic rename and cannot write two objects atomically. Some show a file while it is still being
written. So no object is ever written twice, and object names and sizes alone show the state of the store:

    blobs/ab/ab12.../<upload>.<member>                 the members of one upload, under unique names
    blobs/ab/ab12.../done.<turn>.<upload>.<members>.<bytes>
                                                       written last: the upload is complete, with this member count
                                                       and size
    begun/<upload>.<digest>                            an upload or a deletion is in progress
    claims/<registry>                                  a registry refers to blobs here
    slora-store                                        marks the existence of a store

The blob of a digest is the last complete upload in its folder, ordered by turn. Each writer finds the highest
turn, uses the next one, and removes the uploads before the last one. Only a deletion removes the last upload. So
readers never see a partial blob, two uploads of one digest never mix, and a deletion removes exactly what it found. One
listing shows whether a blob exists and how large its members are. With these sizes a reader fetches all members in
parallel, large ones in several ranges (`object_blob.py`).

Three alternatives were rejected:

- The Redis store's layout, a manifest that names its chunks. Each upload would overwrite the manifest, and only some
  filesystems do that atomically. A deletion cannot be limited to one version of the manifest, so it could leave members
  of another upload without a manifest.
- Members named by their content. Uploads would share members, so they would need reference counts.
- obstore instead of fsspec. Version 0.12.1 works against an S3 server (moto), and its put with `mode="create"` fails if
  the object exists. But existing stores must keep this layout, so the change would affect only the six short functions
  that call fsspec. obstore supports only S3, Google Cloud Storage and Azure, so SFTP and all other remote filesystems
  would be lost. So would the options of fsspec's configuration. Consider obstore again with a new layout that is based
  on conditional puts.

A note in `begun` survives the crash of its writer. A live writer gives up long before its note is considered old.
Opening the store, and each put, checks a few old notes and removes the incomplete uploads that they name.

The module needs the package fsspec, so only `store_url.py` imports it.
"""

import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.core import url_to_fs

from slora_adapters.errors import AdapterError, AdapterNotFound, StoreUnavailable, StoreUnfit, TryAgain
from slora_adapters.store.object_blob import TIER, ObjectBlob
from slora_adapters.store.store import check_digest, check_member_name, is_digest

_NUM_THREADS = 16
# A writer that takes longer than UPLOAD_LIMIT_S gives up. So an incomplete upload older than LEFTOVER_AGE_S has no
# writer. The difference allows for clock skew between hosts.
UPLOAD_LIMIT_S = 3600
LEFTOVER_AGE_S = 24 * 3600
_MAX_SWEPT = 16
# Maximum number of attempts to list a folder that changes while it is listed.
_MAX_ATTEMPTS = 10

_UPLOAD = "[0-9a-f]{40}"
_DONE = re.compile(rf"done\.(\d{{1,18}})\.({_UPLOAD})\.(\d{{1,6}})\.(\d{{1,18}})", re.ASCII)
_MEMBER = re.compile(rf"({_UPLOAD})\.(.+)", re.ASCII)
_NOTE = re.compile(rf"({_UPLOAD})\.([0-9a-f]{{64}})", re.ASCII)
_SECRET_OPTION = re.compile("pass|secret|token|key|sas|cred|connection", re.IGNORECASE)


def open_object_store(url: str) -> "ObjectStore":
    """Opens the store at an fsspec URL. Its filesystem reads options from fsspec's configuration and from its own
    environment variables.

    Raises ValueError for a URL that no installed package supports, StoreUnfit if it cannot be written, and
    StoreUnavailable if it does not answer.
    """
    parts = urlsplit(url)
    scheme = parts.scheme
    if "::" in url:
        raise ValueError(
            "a store's URL cannot be a chain of filesystems ('::'), because a cache between them may be stale"
        )
    if not parts.netloc + parts.path.strip("/"):
        raise ValueError(
            f"the URL of a {scheme}:// store needs a bucket and folder, as in {scheme}://bucket/folder"
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise ValueError(
            f"the store's URL scheme {scheme!r} is not supported; give a path, file:///path, "
            "redis://host/db or a URL that fsspec supports (s3://, gs://, abfs://, ...)"
        ) from None
    except ImportError as error:
        raise ValueError(
            f"a {scheme}:// store needs another package in addition to slora[objects]: {error}"
        ) from None
    with _as_unavailable(scheme, _secrets(url)):
        # fsspec's shared instance is not used, because the store disables the listing cache of its instance.
        filesystem, root = url_to_fs(url, skip_instance_cache=True)
    store = ObjectStore(filesystem, root, scheme=scheme, secrets=_secrets(url))
    store.prepare()
    return store


@dataclass(slots=True)
class _Upload:
    """The objects of one upload in a folder."""

    upload_id: str
    members: dict[str, int] = field(default_factory=dict)
    done: str | None = None  # name of the upload's `done` object, or None
    turn: int = 0
    promised: tuple[int, int] = (0, 0)  # the member count and the total bytes in this name

    @property
    def is_whole(self) -> bool:
        return self.done is not None and self.promised == (len(self.members), sum(self.members.values()))


class ObjectStore:
    """Implements `store.Store` with fsspec.

    `put` is as durable as a finished write of the filesystem. A write to local files may not survive a power failure;
    use `file_store.py` for them.

    root: root path, in the filesystem's syntax. secrets: strings that are removed from error messages. clock: returns
    the Unix time.
    """

    tiers = (TIER,)

    def __init__(
        self,
        filesystem: Any,
        root: str,
        *,
        scheme: str,
        secrets: tuple[str, ...] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._filesystem = filesystem
        # A cached listing would hide what other processes have written since.
        filesystem.dircache.use_listings_cache = False
        self._root = root.rstrip("/")
        self._begun = f"{self._root}/begun"
        self._scheme = scheme
        self._secrets = (*secrets, *_option_secrets(filesystem.storage_options))
        self._clock = clock
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "object-store")

    def prepare(self) -> None:
        """Checks that objects can be written, listed and removed here. Raises StoreUnfit, StoreUnavailable."""
        with self._as_unavailable():
            try:
                if not self._is_there(f"{self._root}/slora-store"):
                    self._write(f"{self._root}/slora-store", b"adapters of slora\n")
                for _ in range(2):  # with a cached listing, the second note does not appear
                    with self._noted("0" * 64) as upload_id:
                        if not any(name.startswith(upload_id) for name, _ in self._list(self._begun)):
                            raise self._unlisted()
                self._sweep()
            except (FileNotFoundError, PermissionError, NotImplementedError) as error:
                cause = _cause(error, self._secrets)
                raise StoreUnfit(f"the {self._scheme}:// store cannot be written: {cause}") from None

    def put(self, digest: str, members: Mapping[str, Path | bytes]) -> None:
        check_digest(digest)
        for name in members:
            check_member_name(name)
        with self._as_unavailable():
            self._check_there()
            self._sweep()
            with self._noted(digest) as upload_id:
                try:
                    self._upload(digest, upload_id, members)
                except BaseException:
                    self._abandon(digest, upload_id)
                    raise

    def open(self, digest: str) -> ObjectBlob:
        check_digest(digest)
        with self._as_unavailable():
            upload = self._find(digest)
            if upload is None:
                self._check_there()
                raise AdapterNotFound(f"the store has no adapter {digest[:12]}")
        prefix = f"{self._folder(digest)}/{upload.upload_id}."

        def read(name: str, start: int, end: int) -> bytes:
            with self._as_unavailable():
                return self._read_range(prefix + name, start, end)

        return ObjectBlob(upload.members, read, self._threads)

    def exists(self, digest: str) -> bool:
        check_digest(digest)
        with self._as_unavailable():
            if self._find(digest) is not None:
                return True
            self._check_there()
            return False

    def delete(self, digest: str) -> None:
        check_digest(digest)
        with self._as_unavailable():
            found = [upload for upload in self._uploads(digest) if upload.done or self._is_abandoned(upload)]
            if not found:
                self._check_there()
                return
            with self._noted(digest):
                self._remove_uploads(digest, found)

    def report_corrupt(self, digest: str) -> bool:
        """Returns False, because the store has only one copy."""
        return False

    def digests(self) -> Iterator[str]:
        """Lists folder by folder, at most 256 folders, so that the whole listing is never in memory."""
        with self._as_unavailable():
            self._check_there()
            shards = [name for name, _ in self._list(f"{self._root}/blobs")]
        for shard in shards:
            with self._as_unavailable():
                names = [name for name, _ in self._list(f"{self._root}/blobs/{shard}") if is_digest(name)]
                found = list(self._threads.map(self._find, names))
            yield from (name for name, upload in zip(names, found, strict=True) if upload is not None)

    def claim(self, registry: str) -> None:
        with self._as_unavailable():
            self._write(f"{self._root}/claims/{registry}", b"refers to blobs here\n")

    def claims(self) -> frozenset[str]:
        with self._as_unavailable():
            self._check_there()
            return frozenset(name for name, _ in self._list(f"{self._root}/claims"))

    def check(self) -> None:
        with self._as_unavailable():
            self._check_there()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _upload(self, digest: str, upload_id: str, members: Mapping[str, Path | bytes]) -> None:
        folder = self._folder(digest)
        sizes = [
            len(content) if isinstance(content, bytes) else content.stat().st_size
            for content in members.values()
        ]
        turn = 1 + max((upload.turn for upload in self._uploads(digest)), default=0)
        writes = [
            self._threads.submit(self._write, f"{folder}/{upload_id}.{name}", content)
            for name, content in members.items()
        ]
        wait(
            writes
        )  # wait for all, even if one fails: objects written after the cleanup would never be removed
        for write in writes:
            write.result()
        if self._age_s(upload_id) > UPLOAD_LIMIT_S:
            raise TryAgain(f"the upload took more than {UPLOAD_LIMIT_S} s; try again")
        done = f"{folder}/done.{turn}.{upload_id}.{len(sizes)}.{sum(sizes)}"
        self._write(done, b"whole\n")
        self._remove_uploads(digest, self._outdone(self._settled(digest, upload_id, done)))

    def _settled(self, digest: str, upload_id: str, done: str) -> list[_Upload]:
        """Returns the uploads of the digest, once `upload_id` is listed as complete or another process removed it."""
        for _ in range(_MAX_ATTEMPTS):
            uploads = self._uploads(digest)
            if any(upload.upload_id == upload_id and upload.is_whole for upload in uploads):
                return uploads
            if not self._is_there(done):
                return uploads
        raise self._unlisted()

    def _unlisted(self) -> StoreUnfit:
        return StoreUnfit(
            f"the {self._scheme}:// store does not list an object that was just written; disable the "
            "cache of its listings"
        )

    def _outdone(self, uploads: list[_Upload]) -> list[_Upload]:
        """Returns the uploads that a later complete upload replaced, and incomplete uploads without a writer."""
        last = max((index for index, upload in enumerate(uploads) if upload.is_whole), default=0)
        return [
            upload
            for index, upload in enumerate(uploads)
            if (upload.done and index < last) or self._is_abandoned(upload)
        ]

    def _abandon(self, digest: str, upload_id: str) -> None:
        """Tries to remove the objects of a failed upload. Its note stays, because a write that failed here may still
        complete.
        """
        # If the removal fails too, only the error of the upload is reported, because it is more useful.
        with suppress(Exception):
            own = [upload for upload in self._uploads(digest) if upload.upload_id == upload_id]
            self._remove_uploads(digest, own)

    def _sweep(self) -> None:
        """Removes the incomplete uploads of crashed writers. Each note names one such upload. Handles at most
        _MAX_SWEPT old notes.
        """
        notes = [match for name, _ in self._list(self._begun) if (match := _NOTE.fullmatch(name))]
        for match in [match for match in notes if self._is_old(match[1])][:_MAX_SWEPT]:
            upload_id, digest = match.groups()
            self._remove_uploads(digest, self._outdone(self._uploads(digest)))
            self._remove(self._note(digest, upload_id))

    def _find(self, digest: str) -> _Upload | None:
        """Returns the last complete upload of the digest; None if there is none."""
        for _ in range(_MAX_ATTEMPTS):
            uploads = self._uploads(digest)
            whole = [upload for upload in uploads if upload.is_whole]
            if whole:
                return whole[-1]
            if not any(upload.done for upload in uploads):
                break
            # A listing of files is not a snapshot. It may show an upload that is being removed, and miss the upload
            # that replaced it.
        return None

    def _uploads(self, digest: str) -> list[_Upload]:
        """Returns all uploads of a digest, complete or not, ordered by turn."""
        found: dict[str, _Upload] = {}
        for name, num_bytes in self._list(self._folder(digest)):
            if match := _DONE.fullmatch(name):
                upload = found.setdefault(match[2], _Upload(match[2]))
                upload.done, upload.turn = name, int(match[1])
                upload.promised = int(match[3]), int(match[4])
            elif match := _MEMBER.fullmatch(name):
                found.setdefault(match[1], _Upload(match[1])).members[match[2]] = num_bytes
        return sorted(found.values(), key=lambda upload: (upload.turn, upload.upload_id))

    def _read_range(self, path: str, start: int, end: int) -> bytes:
        """Reads bytes [start, end) of a member. Raises AdapterNotFound if the upload was replaced or deleted after it
        was listed.
        """
        try:
            piece: bytes = self._filesystem.cat_file(path, start=start, end=end)
        except FileNotFoundError:
            raise AdapterNotFound(
                f"{path.rsplit('/', 1)[-1]!r} was removed while it was being read"
            ) from None
        if len(piece) != end - start:
            raise OSError(
                f"the store returned {len(piece)} bytes for bytes {start} to {end} of "
                f"{path.rsplit('/', 1)[-1]!r}"
            )
        return piece

    def _remove_uploads(self, digest: str, uploads: list[_Upload]) -> None:
        """Removes uploads. The `done` object is removed first, so that no reader opens an upload while it is being
        removed.
        """
        folder = self._folder(digest)
        for upload in uploads:
            if upload.done:
                self._remove(f"{folder}/{upload.done}")
            for name in upload.members:
                self._remove(f"{folder}/{upload.upload_id}.{name}")

    @contextmanager
    def _noted(self, digest: str) -> Iterator[str]:
        """Yields the id of a new upload. Its note is removed only if the block ends without an error."""
        upload_id = f"{int(self._clock()):08x}{uuid.uuid4().hex}"
        note = self._note(digest, upload_id)
        self._write(note, b"begun\n")
        yield upload_id
        self._remove(note)

    def _is_abandoned(self, upload: _Upload) -> bool:
        return not upload.is_whole and self._is_old(upload.upload_id)

    def _is_old(self, upload_id: str) -> bool:
        return self._age_s(upload_id) > LEFTOVER_AGE_S

    def _age_s(self, upload_id: str) -> float:
        """Returns the seconds since the upload began. The id of an upload starts with that time."""
        return self._clock() - int(upload_id[:8], 16)

    def _folder(self, digest: str) -> str:
        return f"{self._root}/blobs/{digest[:2]}/{digest}"

    def _note(self, digest: str, upload_id: str) -> str:
        return f"{self._begun}/{upload_id}.{digest}"

    def _check_there(self) -> None:
        """Raises StoreUnavailable if the store itself is missing, for example because it is not mounted or its bucket
        was deleted.
        """
        if not self._is_there(f"{self._root}/slora-store"):
            raise StoreUnavailable(
                f"the {self._scheme}:// store no longer exists at its URL; check that it was not moved"
            )

    def _is_there(self, path: str) -> bool:
        """Returns whether an object exists. Reads the object itself, because a filesystem may answer existence checks
        from a cache.
        """
        try:
            self._filesystem.cat_file(path)
        except FileNotFoundError:
            return False
        return True

    def _list(self, folder: str) -> list[tuple[str, int]]:
        """Returns (name, bytes) of each entry of a folder."""
        try:
            entries = self._filesystem.ls(folder, detail=True)
        except FileNotFoundError:
            return []
        return [(entry["name"].rstrip("/").rsplit("/", 1)[-1], entry["size"] or 0) for entry in entries]

    def _write(self, path: str, content: Path | bytes) -> None:
        try:
            self._send(path, content)
        except FileNotFoundError:
            if not self._root.startswith("/"):
                raise  # the bucket does not exist; only the operator creates buckets
            self._filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            self._send(path, content)

    def _send(self, path: str, content: Path | bytes) -> None:
        if isinstance(content, bytes):
            self._filesystem.pipe_file(path, content)
        else:
            self._filesystem.put_file(str(content), path)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(path)

    @contextmanager
    def _as_unavailable(self) -> Iterator[None]:
        with _as_unavailable(self._scheme, self._secrets):
            yield


def _secrets(url: str) -> tuple[str, ...]:
    parts = urlsplit(url)
    found = [parts.password, parts.query]
    return tuple({text for name in found if name for text in (name, unquote(name))})


def _option_secrets(options: Mapping[str, Any]) -> Iterator[str]:
    """Yields values of filesystem options, from the URL or the configuration, that must not appear in messages."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _option_secrets(value)
        elif isinstance(value, str) and value and _SECRET_OPTION.search(name):
            yield value


def _cause(error: BaseException, secrets: tuple[str, ...]) -> str:
    """Returns the backend's message without known secrets, and without credentials and query strings of URLs."""
    text = str(error)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    text = re.sub(r"://[^/\s@]*@", "://***@", text)
    text = re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1?***", text).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def _as_unavailable(scheme: str, secrets: tuple[str, ...]) -> Iterator[None]:
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:  # fsspec's backends have no other common exception class.
        # Not `from error`, because the traceback would show the secrets that the message leaves out.
        raise StoreUnavailable(f"the {scheme}:// store is unavailable: {_cause(error, secrets)}") from None
