"""Reads the members of a tar in one pass, and limits the size of all headers.

Supported formats are POSIX ustar and pax, GNU tar's long names, and pre-POSIX tars. Uploads are not read with Python's
`tarfile`. It takes a damaged header, a cut between members or a pax size that is no number for the end of the archive,
so it would silently serve an adapter without some of its files. It also recurses once for each consecutive header, and
parses headers of any length and number. Here headers are counted before they are read, so the work is proportional to
the content of the members.

Sizes and names in headers are not trusted. The caller decides what a name means.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from gzip import GzipFile
from typing import BinaryIO, NoReturn

from slora_adapters.errors import AdapterInvalid, Reason

_BLOCK_BYTES = 512
# A tar ends with two blocks of zeros.
_END_BYTES = 2 * _BLOCK_BYTES
_CHUNK_BYTES = 1 << 20
# A member normally has at most four extension headers: a long name, a long link, a pax header and a global pax header.
_MAX_EXTENSIONS = 8
# Names, times and attributes need a few hundred bytes per member; macOS adds a few kilobytes.
_MAX_EXTENSION_BYTES = 64 << 10
_MAX_EXTENSION_BYTES_IN_ALL = 1 << 20

_NAME, _SIZE, _CHECKSUM, _TYPE, _MAGIC, _PREFIX = (
    slice(0, 100),
    slice(124, 136),
    slice(148, 156),
    slice(156, 157),
    slice(257, 263),
    slice(345, 500),
)
_POSIX_MAGIC = b"ustar\0"
_LONG_NAME, _LONG_LINK = b"L", b"K"
_PAX, _SOLARIS_PAX, _GLOBAL_PAX = b"x", b"X", b"g"
_EXTENSIONS = (_LONG_NAME, _LONG_LINK, _PAX, _SOLARIS_PAX, _GLOBAL_PAX)
_FILE_TYPES = (b"0", b"\0", b"7")
_DIRECTORY = b"5"
_ODDITIES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a named pipe",
    b"S": "a sparse file",
}


class _Bytes:
    """The decompressed bytes of a tar, limited to `max_bytes`."""

    def __init__(self, file: BinaryIO | GzipFile, max_bytes: int) -> None:
        self.position = 0
        self._file = file
        self._max_bytes = max_bytes

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; empty at the end of the tar."""
        chunk = self._file.read(size)
        self.position += len(chunk)
        if self.position > self._max_bytes:
            _refuse("archive_too_large", f"the archive unpacks to more than {self._max_bytes} bytes")
        return chunk

    def read_exactly(self, size: int) -> bytes:
        return b"".join(self.read_chunks(size))

    def read_chunks(self, size: int) -> Iterator[bytes]:
        """Yields exactly `size` bytes. Raises ValueError if there are fewer."""
        while size:
            chunk = self.read(min(size, _CHUNK_BYTES))
            if not chunk:
                raise ValueError("unexpected end of data")
            size -= len(chunk)
            yield chunk

    def skip(self, size: int) -> None:
        for _ in self.read_chunks(size):
            pass


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of an archive. Its content must be read before the next entry is requested."""

    name: str  # exactly as the archive spells it
    size: int  # as the archive states it
    is_directory: bool
    oddity: (
        str | None
    )  # why it can't be read as a file or directory, such as "a symbolic link"; None if it can
    read: Callable[[], Iterator[bytes]]  # yields the content, in chunks


@dataclass(slots=True)
class _Extension:
    """Fields of the next member's header that extension headers override. None means not overridden."""

    name: str | None = None
    size: int | None = None
    is_sparse: bool = False


def read_tar(file: BinaryIO | GzipFile, max_bytes: int) -> Iterator[Member]:
    """Yields the members in `file`, which is only read forward.

    max_bytes: limit on the decompressed size of the whole tar. Raises ValueError if the file is not a tar or is
    truncated, and AdapterInvalid if it exceeds a limit.
    """
    source = _Bytes(file, max_bytes)
    extensions = _Extensions(source)
    while (header := _read_header(source)) is not None:
        kind, size = header[_TYPE], _read_number(header[_SIZE])
        if size < 0:
            raise ValueError(f"a member has the negative size {size}")
        if kind in _EXTENSIONS:
            extensions.read(kind, size)
            continue
        member, num_bytes = _make_member(source, header, size, extensions.pop())
        end = source.position + num_bytes + -num_bytes % _BLOCK_BYTES
        yield member
        source.skip(end - source.position)
    _check_end(source)


class _Extensions:
    """Reads the extension headers that precede a member's own header."""

    def __init__(self, source: _Bytes) -> None:
        self._source = source
        self._next = _Extension()
        self._num_in_row = 0
        self._bytes_in_all = 0

    def read(self, kind: bytes, size: int) -> None:
        self._num_in_row += 1
        self._bytes_in_all += size
        if self._num_in_row > _MAX_EXTENSIONS:
            _refuse(
                "archive_header",
                f"the archive has more than {_MAX_EXTENSIONS} extended headers in a row; create the "
                "archive again without them",
            )
        if size > _MAX_EXTENSION_BYTES or self._bytes_in_all > _MAX_EXTENSION_BYTES_IN_ALL:
            _refuse(
                "archive_header",
                f"the archive has an extended header of {size} bytes, {self._bytes_in_all} bytes in "
                f"total; at most {_MAX_EXTENSION_BYTES} each and {_MAX_EXTENSION_BYTES_IN_ALL} in "
                "total are accepted: create the archive without extended attributes",
            )
        content = self._source.read_exactly(size)
        self._source.skip(-size % _BLOCK_BYTES)
        if kind == _LONG_NAME:
            self._next.name = _decode(content)
        elif kind != _LONG_LINK:
            self._apply(_read_pax(content), is_global=kind == _GLOBAL_PAX)

    def pop(self) -> _Extension:
        """Returns the extensions that were read since the last member."""
        popped, self._next, self._num_in_row = self._next, _Extension(), 0
        return popped

    def _apply(self, records: Mapping[bytes, bytes], *, is_global: bool) -> None:
        is_sparse = any(key.startswith(b"GNU.sparse.") for key in records)
        if is_global and (is_sparse or b"path" in records or b"size" in records):
            raise ValueError("a global header sets one name or one size for all members")
        if b"path" in records:
            self._next.name = _decode(records[b"path"])
        if b"size" in records:
            if not records[b"size"].isdigit() or len(records[b"size"]) > 18:
                raise ValueError("a pax header with an invalid size")
            self._next.size = int(records[b"size"])
        self._next.is_sparse |= is_sparse


def _read_header(source: _Bytes) -> bytes | None:
    """Returns the next header block; None at a block of zeros, which ends the tar."""
    start = source.position
    try:
        header = source.read_exactly(_BLOCK_BYTES)
    except ValueError:
        _raise_no_member(start)
    if not any(header):
        return None
    unsigned = sum(header) - sum(header[_CHECKSUM]) + 8 * ord(" ")
    signed = unsigned - 256 * sum(byte > 127 for byte in header[:148] + header[156:])
    try:
        matches = _read_number(header[_CHECKSUM]) in (unsigned, signed)
    except ValueError:
        matches = False
    if not matches:
        if start == 0:
            raise ValueError("invalid header")
        _raise_no_member(start)
    return header


def _check_end(source: _Bytes) -> None:
    """Checks the end of the tar after the first block of zeros: at least one more block of zeros must follow, and
    nothing else.
    """
    end = source.position - _BLOCK_BYTES
    while chunk := source.read(_CHUNK_BYTES):
        if chunk.strip(b"\0"):
            _raise_no_member(end)
    if source.position < end + _END_BYTES:
        _raise_no_member(end)


def _raise_no_member(position: int) -> NoReturn:
    raise ValueError(f"there is neither a member nor the end of the archive at byte {position}")


def _make_member(source: _Bytes, header: bytes, size: int, extension: _Extension) -> tuple[Member, int]:
    """Returns the member, and the number of bytes of its content in the tar."""
    kind = header[_TYPE]
    name = _decode(header[_NAME])
    if header[_MAGIC] == _POSIX_MAGIC and (prefix := _decode(header[_PREFIX])):
        name = f"{prefix}/{name}"
    name = name if extension.name is None else extension.name
    size = size if extension.size is None else extension.size
    is_directory = kind == _DIRECTORY or (kind == b"\0" and name.endswith("/"))
    oddity = None
    if extension.is_sparse:
        oddity = _ODDITIES[b"S"]
    elif not is_directory and kind not in _FILE_TYPES:
        oddity = _ODDITIES.get(kind, "of an unknown kind")
    # Only files have content, even if the header of another kind gives a size.
    num_bytes = size if kind in _FILE_TYPES and not is_directory else 0
    return Member(name, size, is_directory, oddity, partial(source.read_chunks, num_bytes)), num_bytes


def _read_number(field: bytes) -> int:
    """Parses octal digits, or the GNU format for larger numbers: a sign byte and a base-256 number."""
    if field[0] in (0x80, 0xFF):
        value = int.from_bytes(field[1:], "big")
        return value if field[0] == 0x80 else value - (1 << 8 * (len(field) - 1))
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise ValueError("invalid header")
    return int(digits or b"0", 8)


def _read_pax(content: bytes) -> dict[bytes, bytes]:
    """Parses the records of a pax header. Each record is `length key=value` and a line feed; the length counts the
    whole record.
    """
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(content) and content[position]:
        digits = content[position : position + 8].split(b" ", 1)[0]
        end = position + (int(digits) if digits.isdigit() else 0)
        key, equals, value = content[position + len(digits) + 1 : max(position, end - 1)].partition(b"=")
        if not equals or not key or content[end - 1 : end] != b"\n":
            raise ValueError(f"an invalid pax header at byte {position}")
        records[key] = value
        position = end
    return records


def _decode(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _refuse(code: str, message: str) -> NoReturn:
    raise AdapterInvalid((Reason(code, message),))
