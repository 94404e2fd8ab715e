"""Receives a file as multipart/form-data, as OpenAI's clients send it. Its bytes go to the disk as they arrive.

The body limit bounds the size and the rate of the whole body, and each small field has a limit of its own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from slora_api.adapters.quarantine import Quarantine
from slora_api.batches.files import check_purpose
from slora_api.errors import BadRequest, BodyTooLarge

__all__ = ["ReceivedFile", "receive_file"]

_FILE = "file"
_TEXTS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_TEXT_BYTES = 256
_MAX_FILENAME_CHARS = 255
_MAX_HEADER_BYTES = 4096
_CHUNK_BYTES = 1 << 20
# As in OpenAI's API: from an hour to thirty days.
_EXPIRES_S = (3600, 2_592_000)


@dataclass(frozen=True, slots=True)
class ReceivedFile:
    filename: str
    path: Path
    expires_after_s: int | None


class _Form:
    """Parses one body. Its methods run on a thread, one at a time. Raises BadRequest or BodyTooLarge."""

    def __init__(self, boundary: bytes, path: Path, max_bytes: int) -> None:
        self.texts: dict[str, bytearray] = {}
        self.filename: str | None = None
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._file = path.open("xb")
        self._field = ""
        self._header, self._disposition = bytearray(), bytearray()
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._header.clear,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_end": self._on_end,
            },
            max_header_size=_MAX_HEADER_BYTES,
        )

    def write(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadRequest(f"The body is not valid multipart/form-data: {error}.") from None

    def finish(self) -> tuple[str, int | None]:
        """Returns the file's name and the seconds after which it expires."""
        self._file.flush()
        if not self._ended:
            raise BadRequest("The body ends too early; it is not complete multipart/form-data.")
        missing = [
            name
            for name, is_there in (
                ("purpose", "purpose" in self.texts),
                (_FILE, self.filename is not None),
            )
            if not is_there
        ]
        if missing:
            raise BadRequest(
                f"The multipart field `{missing[0]}` is missing.", missing[0], "missing_parameter"
            )
        check_purpose(self._text("purpose"))
        if not self._num_bytes:
            raise BadRequest("`file` is empty; send the lines of a batch.", _FILE)
        assert self.filename is not None
        return self.filename, self._expiry()

    def close(self) -> None:
        self._file.close()

    def _text(self, name: str) -> str:
        return self.texts[name].decode("utf-8", "replace")

    def _expiry(self) -> int | None:
        sent = [name for name in _TEXTS[1:] if name in self.texts]
        if not sent:
            return None
        if len(sent) < 2 or self._text(_TEXTS[1]) != "created_at":
            raise BadRequest(
                "`expires_after` needs `anchor`, which must be `created_at`, and `seconds`.", "expires_after"
            )
        text = self._text(_TEXTS[2])
        seconds = int(text) if text.isascii() and text.isdigit() else -1
        if not _EXPIRES_S[0] <= seconds <= _EXPIRES_S[1]:
            raise BadRequest(
                f"`expires_after[seconds]` is {text[:32]!r}; it must be a whole number from {_EXPIRES_S[0]} to "
                f"{_EXPIRES_S[1]}.",
                "expires_after",
            )
        return seconds

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition += data[start:end]

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(bytes(self._disposition))
        self._disposition.clear()
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        if self._field in self.texts or (self._field == _FILE and self.filename is not None):
            raise BadRequest(f"The multipart field `{self._field}` appears twice; send it once.", self._field)
        if self._field == _FILE:
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            shown = "".join(letter for letter in name if letter.isprintable())
            self.filename = shown[-_MAX_FILENAME_CHARS:] or "file.jsonl"
        elif self._field in _TEXTS:
            self.texts[self._field] = bytearray()
        else:
            raise BadRequest(
                f"`{self._field[:80]}` is not a multipart field of this route; the fields are file, "
                f"{', '.join(_TEXTS)}.",
                self._field[:80],
                "unknown_parameter",
            )

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == _FILE:
            self._num_bytes += end - start
            if self._num_bytes > self._max_bytes:
                raise BodyTooLarge(self._max_bytes, "max_file_bytes")
            self._file.write(memoryview(data)[start:end])
            return
        text = self.texts[self._field]
        text += data[start:end]
        if len(text) > _MAX_TEXT_BYTES:
            raise BadRequest(f"`{self._field}` is larger than {_MAX_TEXT_BYTES} bytes.", self._field)

    def _on_end(self) -> None:
        self._ended = True


@asynccontextmanager
async def receive_file(
    quarantine: Quarantine, content_type: str, stream: AsyncIterator[bytes], max_bytes: int
) -> AsyncIterator[ReceivedFile]:
    """Receives the file in `stream`. It exists for the duration of the context.

    Raises BadRequest, BodyTooLarge, DiskFull, and what `stream` raises.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise BadRequest("Send the file as multipart/form-data with the fields file and purpose.")
    async with quarantine.folder() as folder:
        path = folder / "file"
        form = await asyncio.to_thread(_Form, options[b"boundary"], path, max_bytes)
        try:
            pending: list[bytes] = []
            num_bytes = 0
            async for chunk in stream:
                pending.append(chunk)
                num_bytes += len(chunk)
                if num_bytes >= _CHUNK_BYTES:
                    await asyncio.to_thread(form.write, b"".join(pending))
                    pending, num_bytes = [], 0
            await asyncio.to_thread(form.write, b"".join(pending))
            filename, expires_after_s = await asyncio.to_thread(form.finish)
        finally:
            await asyncio.to_thread(form.close)
        yield ReceivedFile(filename, path, expires_after_s)
