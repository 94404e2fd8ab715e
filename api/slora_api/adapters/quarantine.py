"""Stages the files of an adapter until they have been checked: an upload, a download from the Hugging Face hub, or a
directory on the server's disk.

Each upload has a folder of its own, which is deleted when the upload ends, with or without an error. `RequestLimiter`
bounds the number of folders. The files get fixed names. The client's file names are only used to refuse pickles.

Operators who migrate from vLLM may load adapters from below one root directory. Symbolic links in a path are resolved
first, and the resulting path must be below the root. So no link leads out of the root. Each file is opened once and
copied into the quarantine, and is then inspected like an upload. Later changes below the root have no effect on the
adapter.

This module does not interpret the files.
"""

import asyncio
import logging
import os
import re
import shutil
import signal
import stat
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slora.core.errors import ConfigError
from slora_adapters.errors import AdapterInvalid, AdapterNotFound, DiskFull, StoreUnavailable
from slora_adapters.peft.adapter import TENSORS_NAME
from slora_adapters.peft.extras import EXTRA_FIELDS, max_extra_bytes
from slora_adapters.peft.hub_reference import DownloadTask, HubReference, decode_download
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import MEMBER_NAMES, refuse_pickles
from slora_adapters.process.children import BASE_VARIABLES, NETWORK_VARIABLES, pass_on, start_tenant_child
from slora_adapters.process.full_disk import DiskReserve, is_full
from slora_api.core.errors import BadRequest, Forbidden, HubUnavailable, NotFound
from slora_api.core.fair_slots import FairSlots, slots_of_process
from slora_api.core.threads import control_thread, tenant_thread
from slora_api.http.multipart_form import FormPart, check_fields, read_boundary, read_form

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedUpload:
    """An upload whose files are on the disk and have not been checked.

    source: a directory with the files of a PEFT adapter, or an archive file.
    base_fingerprint: fingerprint of the base model that the adapter was trained on; None if the client sent none.
    hub: the adapter that the server must download to `source`; None if the files are there.
    is_trusted: whether the files are the operator's and not a tenant's.
    """

    name: str
    source: Path
    base_fingerprint: str | None = None
    hub: HubReference | None = None
    is_trusted: bool = False


class Quarantine:
    """Owns one directory and empties it at the start, because a killed server may have left files there.

    reserve: the disk reserve; None if there is none.
    """

    def __init__(self, directory: Path, reserve: DiskReserve | None = None) -> None:
        self._directory = directory
        self._reserve = reserve
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)

    @asynccontextmanager
    async def folder(self, tenant: str) -> AsyncIterator[Path]:
        """Yields an empty folder for an upload of the tenant, and always deletes it at the end of the context. Raises
        DiskFull if the disk has no room for what the context writes.
        """
        if self._reserve is not None:
            self._reserve.check()
        try:
            folder = Path(tempfile.mkdtemp(dir=self._directory))
            try:
                yield folder
            finally:
                # This runs on a thread, because a stalled disk must not delay the tokens of all tenants.
                await tenant_thread(tenant, shutil.rmtree, folder, ignore_errors=True)
        except OSError as error:
            if not is_full(error):
                raise
            _log.error("there is no space for an upload in %s: %s", self._directory, error)
            if self._reserve is not None:
                # Check the reserve only now, when the folder is deleted and the disk has room again. One upload that is
                # too large for the disk must not make the server read-only.
                await control_thread(self._reserve.watch)
            raise DiskFull(self._directory.parent) from None


# Multipart field -> the name of the file in the quarantine.
_FILES: Mapping[str, str] = {
    "config": CONFIG_NAME,
    "weights": TENSORS_NAME,
    **EXTRA_FIELDS,
}
_REQUIRED_FILES = ("config", "weights")
# The field that replaces all files above.
_ARCHIVE = "archive"
_ARCHIVE_NAME = "archive"
# The field that names an adapter of the hub instead.
_HUB = "source"
_HUB_FOLDER = "hub"
# Fields that only the body limit bounds. All other files are small.
_LARGE_FILES = ("weights", _ARCHIVE)
# The fields with a text, and the limits of their bytes.
_TEXTS = {"name": 256, "base_fingerprint": 256, _HUB: 1024}
_FINGERPRINT = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_HEADER_BYTES = 1024


def _open_part(folder: Path, field: str, file_name: str, earlier: Collection[str]) -> FormPart:
    """Opens the part of a multipart field. Raises BadRequest or AdapterInvalid."""
    if field not in (*_TEXTS, *_FILES, _ARCHIVE):
        raise BadRequest(
            f"`{field[:80]}` is not a multipart field of an upload; the fields are "
            f"{', '.join((*_TEXTS, *_FILES, _ARCHIVE))}.",
            field[:80],
            "unknown_parameter",
        )
    if pickles := refuse_pickles([file_name]):
        raise AdapterInvalid(tuple(pickles))
    for whole in (_ARCHIVE, _HUB):
        others = {*earlier, field} - {whole, *_TEXTS}
        if whole in (*earlier, field) and others:
            raise BadRequest(f"Send the adapter's files or the multipart field `{whole}`, not both.", field)
    if field in _TEXTS:
        return FormPart(field, file_name, None, _TEXTS[field])
    path = folder / _FILES.get(field, _ARCHIVE_NAME)
    path.parent.mkdir(exist_ok=True)
    limit = None if field in _LARGE_FILES else max_extra_bytes(path.relative_to(folder).as_posix())
    return FormPart(field, file_name, path.open("xb"), limit)


class Uploads:
    """Receives uploads into a quarantine."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine

    @asynccontextmanager
    async def receive(
        self, tenant: str, content_type: str, stream: AsyncIterator[bytes]
    ) -> AsyncIterator[StagedUpload]:
        """Receives the tenant's upload in `stream`. The files exist for the duration of the context.

        Raises BadRequest, AdapterInvalid, and the errors of `stream`.
        """
        boundary = read_boundary(
            content_type,
            "Send the adapter as multipart/form-data with the fields name, config and weights, or name and archive, or "
            "name and source.",
        )
        async with self._quarantine.folder(tenant) as folder:
            parts = await read_form(tenant, stream, boundary, _MAX_HEADER_BYTES, partial(_open_part, folder))
            has_archive, hub = _ARCHIVE in parts, parts.get(_HUB)
            check_fields(parts, "name", *(() if has_archive or hub else _REQUIRED_FILES))
            fingerprint = parts.get("base_fingerprint")
            upload = StagedUpload(
                parts["name"].text,
                folder / _ARCHIVE_NAME if has_archive else folder,
                None if fingerprint is None else _read_fingerprint(fingerprint.text),
            )
            yield upload if hub is None else replace(upload, hub=_read_hub_reference(hub.text))


def _read_fingerprint(text: str) -> str:
    if not _FINGERPRINT.fullmatch(text):
        raise BadRequest(
            f"`base_fingerprint` is {text[:80]!r}; it must be 64 hexadecimal digits, as `slora adapter push --base` "
            "sends them.",
            "base_fingerprint",
        )
    return text


def _read_hub_reference(text: str, param: str = _HUB) -> HubReference:
    try:
        reference = HubReference.parse(text)
    except ValueError:
        reference = None
    if reference is None:
        raise BadRequest(
            f"`{param}` is {text[:200]!r}; it must name an adapter of the Hugging Face hub, such as "
            "hf://ORG/REPO@REVISION or hf://ORG/REPO/FOLDER.",
            param,
        )
    return reference


# Variables for the process that downloads. It gets no token in its environment, but it reads the file of a token.
_HUB_VARIABLES = (
    *(*BASE_VARIABLES, *NETWORK_VARIABLES, "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_ENDPOINT", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_HUB_*_TIMEOUT"),
)
# The client's own cache for chunks of files has no limit that a tenant's quota knows.
_HUB_SETTINGS = {
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
_HUB_GRACE_S = 60
# As for inspections, two downloads are reserved for tenants without a download.
_NUM_DOWNLOADS, _NUM_RESERVED, _MAX_DOWNLOADS = 4, 2, 64


class HubAdapters:
    """Downloads adapters from the Hugging Face hub, each in a process of its own, which ends with the request.

    max_bytes: limit of the files of one adapter. min_bytes_per_s: lowest average rate. num_processes: number of API
    processes of the host, which share the downloads.
    """

    def __init__(self, max_bytes: int, min_bytes_per_s: int, num_processes: int = 1) -> None:
        self._max_bytes = max_bytes
        self._min_bytes_per_s = min_bytes_per_s
        num_slots = slots_of_process(_NUM_DOWNLOADS, _NUM_RESERVED, num_processes)
        self._slots = FairSlots(num_slots, _MAX_DOWNLOADS, "adapters to download", num_reserved=_NUM_RESERVED)

    async def download(self, tenant: str, upload: StagedUpload) -> StagedUpload:
        """Returns the upload with its files, and with the commit that they are from.

        Raises BadRequest if the hub does not have the adapter, HubUnavailable, AdapterInvalid if the adapter is too
        large, and TenantBusy.
        """
        assert upload.hub is not None
        folder = upload.source / _HUB_FOLDER
        async with self._slots.hold(tenant):
            await tenant_thread(tenant, folder.mkdir)
            limits = (self._max_bytes, self._min_bytes_per_s, _HUB_GRACE_S)
            task = DownloadTask(str(upload.hub), str(folder), *limits, parent=os.getpid())
            pinned = await _download(task, upload.hub)
        return replace(upload, source=folder / (pinned.folder or ""), hub=pinned)


async def _download(task: DownloadTask, reference: HubReference) -> HubReference:
    process = await start_tenant_child(
        *("-m", "slora_adapters.peft.hub", task.to_json()),
        environment=pass_on(os.environ, _HUB_VARIABLES) | _HUB_SETTINGS,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        exit_code = await process.wait()
        return decode_download(line)
    except AdapterNotFound as error:
        raise BadRequest(f"The server cannot download `{_HUB}`: {error}.", _HUB) from None
    except StoreUnavailable as error:
        # The reason may name hosts that tenants need not know.
        _log.warning("%s", error)
        why = "the hub does not answer, or refuses the server"
    except ValueError:
        _log.warning("the process that downloaded %s ended with the code %d", reference, exit_code)
        why = "the download failed"
        if exit_code == -signal.SIGALRM:
            why = f"the hub sends less than {task.min_bytes_per_s} bytes/s (min_body_bytes_per_s)"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    raise HubUnavailable(
        f"The server cannot download {reference} now: {why}. The server's log has the reason. Try again, or upload the "
        "files."
    )


_CHUNK_BYTES = 1 << 20
# The maximum number of loads of one tenant that may wait for their turn.
_MAX_WAITING = 64


class LocalAdapters:
    """Copies adapters from below one root directory.

    root: the root directory; None if the server reads no local adapters.
    max_bytes: the size limit of each file. A larger file is refused.

    Raises ConfigError if the root is not a directory.
    """

    def __init__(self, root: Path | None, quarantine: Quarantine, max_bytes: int) -> None:
        if root is not None and not root.is_dir():
            raise ConfigError(
                f"lora_root is {str(root)!r}, which is not a directory; create it, or omit the setting"
            )
        self._root = None if root is None else root.resolve()
        self._quarantine = quarantine
        self._max_bytes = max_bytes
        # One of the two slots is a reserve, so a tenant never gets both. Loads of one tenant therefore run one after
        # the other, and hold at most one of the tenant's permits for uploads.
        self._turns = FairSlots(2, _MAX_WAITING, "adapters to load", num_reserved=1)

    def take_turn(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Waits until no other load of the tenant is in progress. Raises TenantBusy."""
        return self._turns.hold(tenant)

    @asynccontextmanager
    async def copy(self, tenant: str, name: str, path: str) -> AsyncIterator[StagedUpload]:
        """Copies the PEFT directory at `path`, which is absolute or relative to the root. The copy exists for the
        duration of the context. A path such as hf://ORG/REPO names an adapter of the hub, which is not downloaded here.
        tenant: the tenant that gets the adapter.

        Raises Forbidden if the server reads no local adapters. Raises NotFound if there is no adapter at the path, and
        BadRequest if a file is too large.
        """
        if path.startswith("hf://"):
            async with self._quarantine.folder(tenant) as directory:
                yield StagedUpload(name, directory, hub=_read_hub_reference(path, "lora_path"))
            return
        if self._root is None:
            raise Forbidden(
                "This server does not read adapters from its own files; push the adapter, or start "
                "the server with --lora-root DIR."
            )
        async with self._quarantine.folder(tenant) as directory:
            await tenant_thread(tenant, _copy_members, self._root, path, directory, self._max_bytes)
            yield StagedUpload(name, directory)


def _copy_members(root: Path, path: str, directory: Path, max_bytes: int) -> None:
    try:
        source = _below(root, root / path)
        if not source.is_dir():
            raise FileNotFoundError
        for name in MEMBER_NAMES:
            if (source / name).exists():
                (directory / name).parent.mkdir(exist_ok=True)
                _copy(_below(root, source / name), directory / name, max_bytes)
    except (OSError, ValueError) as error:  # A NUL in the path raises ValueError.
        if is_full(error):
            raise
        # A path outside the root and a missing path give the same message, so that a client cannot probe the file
        # system.
        raise NotFound(
            f"`lora_path` is {path[:256]!r}; it must be the directory of an adapter below this "
            "server's lora_root.",
            "lora_path",
        ) from None


def _below(root: Path, path: Path) -> Path:
    """Resolves all links in the path. Raises FileNotFoundError if the result is not below the root."""
    real = path.resolve(strict=True)
    if not real.is_relative_to(root):
        raise FileNotFoundError
    return real


def _copy(source: Path, target: Path, max_bytes: int) -> None:
    """Copies a regular file. Raises BadRequest if the file is too large. Raises OSError if the source is not a regular
    file, or has become a link since the path was resolved. Because of O_NONBLOCK, a named pipe does not block the call.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError
        with target.open("xb") as copy:
            while chunk := file.read(_CHUNK_BYTES):
                # Check the size while copying, because the file may grow.
                if copy.tell() + len(chunk) > max_bytes:
                    raise BadRequest(
                        f"{target.name} is larger than {max_bytes} bytes, this server's limit (max_upload_bytes).",
                        "lora_path",
                    )
                copy.write(chunk)
