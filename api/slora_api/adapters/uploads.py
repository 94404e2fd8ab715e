"""Receives an adapter as multipart/form-data and writes its files, or an archive of them, to the quarantine.

The files get fixed names. The client's file names are only used to refuse pickles. The folder is deleted when the
upload ends, with or without an error.

This module does not interpret the files.
"""

import re
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from slora_adapters.errors import AdapterInvalid
from slora_adapters.peft.extras import EXTRA_FIELDS, max_extra_bytes
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import TENSORS_NAME, refuse_pickles
from slora_api.adapters.quarantine import Quarantine, StagedUpload
from slora_api.core.errors import BadRequest
from slora_api.http.multipart_form import FormPart, check_fields, read_boundary, read_form

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
# Fields that only the body limit bounds. All other files are small.
_LARGE_FILES = ("weights", _ARCHIVE)
_TEXTS = ("name", "base_fingerprint")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_TEXT_BYTES = 256
_MAX_HEADER_BYTES = 1024


def _open_part(folder: Path, field: str, file_name: str, earlier: Collection[str]) -> FormPart:
    """Opens the part of a multipart field. Raises BadRequest or AdapterInvalid."""
    if field in _TEXTS:
        return FormPart(field, file_name, None, _MAX_TEXT_BYTES)
    if field not in _FILES and field != _ARCHIVE:
        raise BadRequest(
            f"`{field[:80]}` is not a multipart field of an upload; the fields are "
            f"{', '.join((*_TEXTS, *_FILES, _ARCHIVE))}.",
            field[:80],
            "unknown_parameter",
        )
    if pickles := refuse_pickles([file_name]):
        raise AdapterInvalid(tuple(pickles))
    fields = {*earlier, field}
    if _ARCHIVE in fields and fields & _FILES.keys():
        raise BadRequest(f"Send the adapter's files or the multipart field `{_ARCHIVE}`, not both.", field)
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
            "Send the adapter as multipart/form-data with the fields name, config and weights, or name and archive.",
        )
        async with self._quarantine.folder(tenant) as folder:
            parts = await read_form(tenant, stream, boundary, _MAX_HEADER_BYTES, partial(_open_part, folder))
            has_archive = _ARCHIVE in parts
            check_fields(parts, "name", *(() if has_archive else _REQUIRED_FILES))
            fingerprint = parts.get("base_fingerprint")
            yield StagedUpload(
                parts["name"].text,
                folder / _ARCHIVE_NAME if has_archive else folder,
                None if fingerprint is None else _read_fingerprint(fingerprint.text),
            )


def _read_fingerprint(text: str) -> str:
    if not _FINGERPRINT.fullmatch(text):
        raise BadRequest(
            f"`base_fingerprint` is {text[:80]!r}; it must be 64 hexadecimal digits, as `slora adapter push --base` "
            "sends them.",
            "base_fingerprint",
        )
    return text
