"""Reads multipart/form-data as it arrives: files go to the disk, and small fields to memory.

The parts are written as they arrive, so the memory used does not grow with the body. Each part may have a limit of its
own; the body limit bounds the size and the rate of the whole body. This module does not interpret the parts.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Annotated, BinaryIO

from pydantic import WithJsonSchema
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from slora_api.core.errors import ApiError, BadRequest
from slora_api.core.threads import tenant_thread

# Bytes handed to the parsing thread at once. A round trip to the thread takes 50 us, which is negligible for this many
# bytes.
_CHUNK_BYTES = 1 << 20

FormFile = Annotated[bytes, WithJsonSchema({"type": "string", "format": "binary"})]


class FormPart:
    """A part of a form.

    file: receives the bytes of the part; None collects them as text. The reader closes the file. max_bytes: limit of
    the part's size; None for no limit. too_large: the error for a larger part; None raises a BadRequest that names the
    field.
    """

    __slots__ = ("_field", "_file", "_max_bytes", "_text", "_too_large", "file_name", "num_bytes")

    def __init__(
        self,
        field: str,
        file_name: str,
        file: BinaryIO | None,
        max_bytes: int | None,
        too_large: ApiError | None = None,
    ) -> None:
        self.file_name = file_name
        self.num_bytes = 0
        self._field = field
        self._file = file
        self._text = bytearray()
        self._max_bytes = max_bytes
        self._too_large = too_large

    @property
    def text(self) -> str:
        return self._text.decode("utf-8", "replace")

    def write(self, data: memoryview) -> None:
        self.num_bytes += len(data)
        if self._max_bytes is not None and self.num_bytes > self._max_bytes:
            raise self._too_large or BadRequest(
                f"`{self._field}` is larger than {self._max_bytes} bytes.", self._field
            )
        if self._file is None:
            self._text += data
        else:
            self._file.write(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Reader:
    """Parses one body. Its methods run on a thread, one at a time. Raises BadRequest, and the errors of `open_part` and
    the parts.
    """

    def __init__(
        self,
        boundary: bytes,
        max_header_bytes: int,
        open_part: Callable[[str, str, Collection[str]], FormPart],
    ) -> None:
        self.parts: dict[str, FormPart] = {}
        self._open_part = open_part
        self._part: FormPart | None = None
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
                "on_part_end": self.close,
                "on_end": self._on_end,
            },
            max_header_size=max_header_bytes,
        )

    def write(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadRequest(f"The body is not valid multipart/form-data: {error}.") from None

    def check_ended(self) -> None:
        if not self._ended:
            raise BadRequest("The body ends too early; it is not complete multipart/form-data.")

    def close(self) -> None:
        """Closes the part that is being received."""
        if self._part is not None:
            self._part.close()
            self._part = None

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition += data[start:end]

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(bytes(self._disposition))
        self._disposition.clear()
        field = options.get(b"name", b"").decode("utf-8", "replace")
        if field in self.parts:
            raise BadRequest(f"The multipart field `{field}` appears twice; send it once.", field)
        file_name = options.get(b"filename", b"").decode("utf-8", "replace")
        self._part = self.parts[field] = self._open_part(field, file_name, self.parts)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part is not None:
            self._part.write(memoryview(data)[start:end])

    def _on_end(self) -> None:
        self._ended = True


def read_boundary(content_type: str, remedy: str) -> bytes:
    """Returns the boundary of a form. Raises BadRequest with `remedy` if the body is not a form."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise BadRequest(remedy)
    return options[b"boundary"]


async def read_form(
    tenant: str,
    stream: AsyncIterator[bytes],
    boundary: bytes,
    max_header_bytes: int,
    open_part: Callable[[str, str, Collection[str]], FormPart],
) -> Mapping[str, FormPart]:
    """Reads a whole form and returns its parts by field.

    tenant: the tenant that sent the form. max_header_bytes: limit of the headers of a part. open_part: returns the part
    for a field. Its arguments are the field, the file name (empty if there is none), and the earlier fields.

    Raises BadRequest, and the errors of `stream`, `open_part` and the parts.
    """
    reader = _Reader(boundary, max_header_bytes, open_part)
    try:
        # Feed the parser in large pieces on a thread, because a slow disk must not block the event loop.
        pending: list[bytes] = []
        num_bytes = 0
        async for chunk in stream:
            pending.append(chunk)
            num_bytes += len(chunk)
            if num_bytes >= _CHUNK_BYTES:
                await tenant_thread(tenant, reader.write, b"".join(pending))
                pending, num_bytes = [], 0
        await tenant_thread(tenant, reader.write, b"".join(pending))
        reader.check_ended()
    finally:
        await tenant_thread(tenant, reader.close)
    return reader.parts


def check_fields(parts: Collection[str], *required: str) -> None:
    """Raises BadRequest for the first field that is missing."""
    for name in required:
        if name not in parts:
            raise BadRequest(f"The multipart field `{name}` is missing.", name, "missing_parameter")
