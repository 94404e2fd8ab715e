"""Receives an adapter as multipart/form-data and writes its files, or an archive of them, to the quarantine.

The parts are written to disk as they arrive, so the memory used does not grow with the upload. The body limit bounds
the size and the rate of the whole body, and each small part has a limit of its own. The files get fixed names. The
client's file names only serve to refuse pickles. The folder is deleted when the upload ends, with or without an error.

This module does not interpret the files.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from slora_adapters.errors import AdapterInvalid
from slora_adapters.peft.extras import GENERATION_NAME, TEMPLATE_NAME, TOKENIZER_NAME
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import TENSORS_NAME, refuse_pickles
from slora_api.adapters.quarantine import Quarantine, StagedUpload
from slora_api.errors import BadRequest

__all__ = ["Uploads"]

# Multipart field -> the name of the file in the quarantine.
_FILES: Mapping[str, str] = {
    "config": CONFIG_NAME,
    "weights": TENSORS_NAME,
    "tokenizer_config": TOKENIZER_NAME,
    "chat_template": TEMPLATE_NAME,
    "generation_config": GENERATION_NAME,
}
_REQUIRED_FILES = ("config", "weights")
# Field that replaces all these files.
_ARCHIVE = "archive"
_ARCHIVE_NAME = "archive"
# Fields that only the body limit bounds. All others are small.
_LARGE_FILES = ("weights", _ARCHIVE)
_TEXTS = ("name", "base_fingerprint")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_TEXT_BYTES = 256
# Limit of every file but weights and archive. Tokenizer configs that list all added tokens have some hundred kilobytes.
_MAX_SMALL_FILE_BYTES = 4 << 20
_MAX_HEADER_BYTES = 1024
# Bytes handed to the parsing thread at once. The thread's round trip costs 50 us, which is small beside this much data.
_CHUNK_BYTES = 1 << 20


class _Part:
    """The part that is being received.

    file: where its bytes are written; None collects them in `text`. max_bytes: limit of its size; None for no limit.
    """

    __slots__ = ("field", "file", "max_bytes", "num_bytes", "text")

    def __init__(self, field: str, file: BinaryIO | None, max_bytes: int | None) -> None:
        self.field = field
        self.file = file
        self.text = bytearray()
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def write(self, data: memoryview) -> None:
        self.num_bytes += len(data)
        if self.max_bytes is not None and self.num_bytes > self.max_bytes:
            raise BadRequest(f"`{self.field}` is larger than {self.max_bytes} bytes.", self.field)
        if self.file is None:
            self.text += data
        else:
            self.file.write(data)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class _Receiver:
    """Parses one body into a directory. Its methods run on a thread, one at a time. Raises BadRequest."""

    def __init__(self, boundary: bytes, directory: Path) -> None:
        self.texts: dict[str, str] = {}
        self._directory = directory
        self._seen: set[str] = set()
        self._part: _Part | None = None
        self._disposition = bytearray()
        self._header = bytearray()
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._header.clear,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
            max_header_size=_MAX_HEADER_BYTES,
        )

    def write(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadRequest(f"The body is not valid multipart/form-data: {error}.") from None

    def finish(self) -> None:
        if not self._ended:
            raise BadRequest("The body ends too early; it is not complete multipart/form-data.")
        required = ("name",) if _ARCHIVE in self._seen else ("name", *_REQUIRED_FILES)
        missing = [name for name in required if name not in self._seen]
        if missing:
            raise BadRequest(
                f"The multipart field `{missing[0]}` is missing.", missing[0], "missing_parameter"
            )

    def close(self) -> None:
        if self._part is not None:
            self._part.close()

    @property
    def source(self) -> Path:
        return self._directory / _ARCHIVE_NAME if _ARCHIVE in self._seen else self._directory

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition += data[start:end]

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(bytes(self._disposition))
        self._disposition.clear()
        field = options.get(b"name", b"").decode("utf-8", "replace")
        if field in self._seen:
            raise BadRequest(f"The multipart field `{field}` appears twice; send it once.", field)
        self._seen.add(field)
        self._part = self._open(field, options.get(b"filename", b"").decode("utf-8", "replace"))

    def _open(self, field: str, file_name: str) -> _Part:
        if field in _TEXTS:
            return _Part(field, None, _MAX_TEXT_BYTES)
        if field not in _FILES and field != _ARCHIVE:
            raise BadRequest(
                f"`{field[:80]}` is not a multipart field of an upload; the fields are "
                f"{', '.join((*_TEXTS, *_FILES, _ARCHIVE))}.",
                field[:80],
                "unknown_parameter",
            )
        if pickles := refuse_pickles([file_name]):
            raise AdapterInvalid(tuple(pickles))
        if _ARCHIVE in self._seen and self._seen & _FILES.keys():
            raise BadRequest(
                f"Send the adapter's files or the multipart field `{_ARCHIVE}`, not both.", field
            )
        file = (self._directory / _FILES.get(field, _ARCHIVE_NAME)).open("xb")
        return _Part(field, file, None if field in _LARGE_FILES else _MAX_SMALL_FILE_BYTES)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part is not None:
            self._part.write(memoryview(data)[start:end])

    def _on_part_end(self) -> None:
        if self._part is not None:
            self._part.close()
            if self._part.file is None:
                self.texts[self._part.field] = self._part.text.decode("utf-8", "replace")
            self._part = None

    def _on_end(self) -> None:
        self._ended = True


class Uploads:
    """Receives uploads into a quarantine."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine

    @asynccontextmanager
    async def receive(self, content_type: str, stream: AsyncIterator[bytes]) -> AsyncIterator[StagedUpload]:
        """Receives the upload in `stream`. Its files exist for the duration of the context.

        Raises BadRequest, AdapterInvalid, and what `stream` raises.
        """
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise BadRequest(
                "Send the adapter as multipart/form-data with the fields name, config and weights, or name and archive."
            )
        async with self._quarantine.folder() as folder:
            receiver = _Receiver(options[b"boundary"], folder)
            try:
                await _receive(receiver, stream)
            finally:
                receiver.close()
            fingerprint = _read_fingerprint(receiver.texts.get("base_fingerprint"))
            yield StagedUpload(receiver.texts["name"], receiver.source, fingerprint)


async def _receive(receiver: _Receiver, stream: AsyncIterator[bytes]) -> None:
    """Feeds the parser in large pieces on a thread, because a slow disk must not block the event loop."""
    pending: list[bytes] = []
    num_bytes = 0
    async for chunk in stream:
        pending.append(chunk)
        num_bytes += len(chunk)
        if num_bytes >= _CHUNK_BYTES:
            await asyncio.to_thread(receiver.write, b"".join(pending))
            pending, num_bytes = [], 0
    await asyncio.to_thread(receiver.write, b"".join(pending))
    receiver.finish()


def _read_fingerprint(text: str | None) -> str | None:
    if text is not None and not _FINGERPRINT.fullmatch(text):
        raise BadRequest(
            f"`base_fingerprint` is {text[:80]!r}; it must be 64 hexadecimal digits, as `slora adapter push --base` "
            "sends them.",
            "base_fingerprint",
        )
    return text
