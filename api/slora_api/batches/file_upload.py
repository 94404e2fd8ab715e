"""Receives a file as multipart/form-data, as OpenAI's clients send it."""

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slora_api.adapters.quarantine import Quarantine
from slora_api.batches.files import check_purpose
from slora_api.core.errors import BadRequest, BodyTooLarge
from slora_api.http.multipart_form import FormPart, check_fields, read_boundary, read_form

_FILE = "file"
_TEXTS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_TEXT_BYTES = 256
_MAX_FILENAME_CHARS = 255
_MAX_HEADER_BYTES = 4096
# As in OpenAI's API: from an hour to thirty days.
_EXPIRES_S = (3600, 2_592_000)


@dataclass(frozen=True, slots=True)
class ReceivedFile:
    filename: str
    path: Path
    expires_after_s: int | None


@asynccontextmanager
async def receive_file(
    tenant: str, quarantine: Quarantine, content_type: str, stream: AsyncIterator[bytes], max_bytes: int
) -> AsyncIterator[ReceivedFile]:
    """Receives the file in `stream`. The copy on disk exists for the duration of the context.

    Raises BadRequest, BodyTooLarge, DiskFull, and the errors of `stream`.
    """
    remedy = "Send the file as multipart/form-data with the fields file and purpose."
    boundary = read_boundary(content_type, remedy)
    async with quarantine.folder(tenant) as folder:
        path = folder / "file"
        parts = await read_form(
            tenant, stream, boundary, _MAX_HEADER_BYTES, partial(_open_part, path, max_bytes)
        )
        check_fields(parts, "purpose", _FILE)
        check_purpose(parts["purpose"].text)
        file = parts[_FILE]
        if not file.num_bytes:
            raise BadRequest("`file` is empty; send the lines of a batch.", _FILE)
        shown = "".join(letter for letter in file.file_name if letter.isprintable())
        yield ReceivedFile(shown[-_MAX_FILENAME_CHARS:] or "file.jsonl", path, _read_expiry(parts))


def _open_part(path: Path, max_bytes: int, field: str, file_name: str, earlier: Collection[str]) -> FormPart:
    """Opens the part of a multipart field. Raises BadRequest. A file that is too large raises BodyTooLarge."""
    if field == _FILE:
        too_large = BodyTooLarge(max_bytes, "max_file_bytes")
        return FormPart(field, file_name, path.open("xb"), max_bytes, too_large)
    if field not in _TEXTS:
        raise BadRequest(
            f"`{field[:80]}` is not a multipart field of this route; the fields are file, {', '.join(_TEXTS)}.",
            field[:80],
            "unknown_parameter",
        )
    return FormPart(field, file_name, None, _MAX_TEXT_BYTES)


def _read_expiry(parts: Mapping[str, FormPart]) -> int | None:
    """Returns the seconds after which the file expires; None if it does not expire."""
    anchor, seconds = (parts.get(name) for name in _TEXTS[1:])
    if anchor is None and seconds is None:
        return None
    if anchor is None or seconds is None or anchor.text != "created_at":
        raise BadRequest(
            "`expires_after` needs `anchor`, which must be `created_at`, and `seconds`.", "expires_after"
        )
    text = seconds.text
    num_seconds = int(text) if text.isascii() and text.isdigit() else -1
    if not _EXPIRES_S[0] <= num_seconds <= _EXPIRES_S[1]:
        raise BadRequest(
            f"`expires_after[seconds]` is {text[:32]!r}; it must be a whole number from {_EXPIRES_S[0]} to "
            f"{_EXPIRES_S[1]}.",
            "expires_after",
        )
    return num_seconds
