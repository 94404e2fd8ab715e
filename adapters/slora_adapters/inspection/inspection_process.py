"""Inspects one adapter in its own process: `slora_adapters.inspection.inspection_process JSON` prints a line of JSON.

This process is the first to open untrusted files. So if they exhaust memory, take endless time or crash the
interpreter, only this process ends. The kernel limits its memory and CPU time. The process is killed when its server
dies. Otherwise it would still read uploaded files while the next server deletes them. The process inherits no secret,
writes only to its scratch directory, and opens no connection.

An archive of the adapter (zip, tar, tar.gz) may contain names that lead outside the directory, links, devices, false
sizes, or a megabyte that expands to a terabyte. So only files that an adapter may have are created, directly in the
given directory. Any other member is skipped or makes the archive invalid. Decompressed bytes are counted, because sizes
in headers are not trusted. The size of the headers is limited before they are parsed.
"""

import gzip
import json
import resource
import struct
import sys
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, cast

from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.peft.adapter import TENSORS_NAME, Adapter, AdapterLimits, CheckedAdapter, summarise
from slora_adapters.peft.extras import max_extra_bytes
from slora_adapters.peft.pattern_process import die_with
from slora_adapters.peft.peft_config import CONFIG_NAME, MAX_CONFIG_BYTES
from slora_adapters.peft.peft_directory import MEMBER_NAMES, is_harmless, read_adapter, refuse_pickles
from slora_adapters.peft.strict_json import parse_object
from slora_adapters.peft.tensor_file import largest_magnitude_bits
from slora_adapters.process.full_disk import is_full
from slora_kernels.layout import ModelShape

MAX_MEMBERS = 1024
_MAX_NAME_CHARS = 255
# Decompressed bytes allowed for skipped members and headers, in addition to the tensors.
_OTHER_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
# Maximum size in bytes of a zip's central directory. It suffices for more than MAX_MEMBERS long names.
_MAX_ZIP_READ_BYTES = 1 << 20
_ARCHIVE_SUFFIXES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".jar", ".whl")
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1
_S_IFMT, _S_IFREG, _S_IFDIR, _S_IFLNK = 0o170000, 0o100000, 0o040000, 0o120000

# Exceptions that the standard library and `read_tar` raise for a broken archive. Errors of the disk are propagated.
_BROKEN = (
    EOFError,
    NotImplementedError,
    ValueError,
    gzip.BadGzipFile,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


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


def unpack(archive: Path, directory: Path, max_tensor_bytes: int) -> None:
    """Writes the adapter's files in `archive` to `directory`, which must exist and be empty.

    The files may be at the top of the archive or in one folder. max_tensor_bytes: limit on the size of the tensor file.
    Raises AdapterInvalid if the archive breaks a rule; some files may have been written by then.
    """
    unpacker = _Unpacker(directory, max_tensor_bytes)
    with archive.open("rb") as file:
        try:
            for member in _members(file, max_tensor_bytes + _OTHER_BYTES):
                unpacker.unpack_member(member)
        except _BROKEN as error:
            _refuse("archive_malformed", f"the archive is broken: {ascii(str(error))[1:-1][:200]}")


def _members(file: BinaryIO, max_bytes: int) -> Iterator[Member]:
    start = file.read(262)
    file.seek(0)
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _zip_members(file)
    if start[:2] == b"\x1f\x8b":
        return read_tar(gzip.GzipFile(fileobj=file), max_bytes)
    if start[257:262] == b"ustar":
        return read_tar(file, max_bytes)
    _refuse(
        "archive_format",
        f"the archive begins with {start[:4].hex(' ') or 'nothing'}; send a .zip, .tar or .tar.gz, or the files "
        "themselves",
    )


class _Unpacker:
    """Extracts the members of one archive and remembers which members it has seen."""

    def __init__(self, directory: Path, max_tensor_bytes: int) -> None:
        self._directory = directory
        self._max_tensor_bytes = max_tensor_bytes
        self._seen: set[tuple[str, ...]] = set()
        self._folder: tuple[str, ...] | None = None
        self._num_members = 0

    def unpack_member(self, member: Member) -> None:
        self._num_members += 1
        if self._num_members > MAX_MEMBERS:
            _refuse(
                "archive_members",
                f"the archive has more than {MAX_MEMBERS} members; remove the files that do not "
                "belong to the adapter",
            )
        path = _check_name(member.name)
        if member.oddity is not None:
            _refuse(
                "archive_member",
                f"{_quote(member.name)} is {member.oddity}; put plain files into the archive",
            )
        if member.is_directory:
            return
        if not path or path in self._seen:
            _refuse("archive_duplicate", f"{_quote(member.name)} is in the archive twice")
        self._seen.add(path)
        _check_case(member.name, path[-1])
        place = next((at for at in (1, 2) if "/".join(path[-at:]) in MEMBER_NAMES), None)
        if place is not None:
            self._check_folder(member.name, path[:-place])
            self._extract(member, "/".join(path[-place:]))
        elif not is_harmless(path):
            _refuse_unknown(member.name, path[-1])

    def _check_folder(self, name: str, folder: tuple[str, ...]) -> None:
        if len(folder) > 1:
            _refuse(
                "archive_place",
                f"{_quote(name)} is {len(folder)} folders deep; at most one folder is accepted",
            )
        if self._folder is not None and folder != self._folder:
            _refuse(
                "archive_place",
                f"{_quote(name)} is not in the same folder as the adapter's other files; put all files "
                "into one folder",
            )
        self._folder = folder

    def _extract(self, member: Member, name: str) -> None:
        limit, setting = max_extra_bytes(name), "the limit for this file"
        if name == TENSORS_NAME:
            limit, setting = self._max_tensor_bytes, "max_upload_bytes"
        size, path = 0, self._directory / name
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as target:
            for chunk in member.read():
                size += len(chunk)
                if size > limit:
                    _refuse("archive_too_large", f"{name} unpacks to more than {limit} bytes ({setting})")
                target.write(chunk)
        if size != member.size:
            _refuse(
                "archive_malformed", f"{name} unpacks to {size} bytes, but the archive states {member.size}"
            )


def _check_name(name: str) -> tuple[str, ...]:
    """Returns the parts of a member's path. Raises AdapterInvalid if the name is not allowed."""
    fault = _name_fault(name)
    if fault is not None:
        _refuse("archive_name", f"the archive's member {_quote(name)} {fault}")
    return tuple(part for part in name.split("/") if part not in ("", "."))


def _name_fault(name: str) -> str | None:
    if len(name) > _MAX_NAME_CHARS:
        return f"has a name of {len(name)} characters; at most {_MAX_NAME_CHARS} are accepted"
    strange = next((character for character in name if not " " <= character <= "~"), None)
    if strange is not None:
        # Only ASCII is allowed, because different Unicode characters can look the same, such as Latin and Cyrillic
        # letters.
        known = unicodedata.name(strange, "a character without a name")
        return f"has U+{ord(strange):04X} ({known}) in its name; use only ASCII characters"
    if "\\" in name:
        return "has a backslash in its name"
    if name.startswith("/") or name[1:2] == ":":
        return "is an absolute path"
    if ".." in name.split("/"):
        return "points outside the archive ('..')"
    return None


def _refuse_unknown(name: str, file_name: str) -> NoReturn:
    if pickles := refuse_pickles([name]):
        raise AdapterInvalid(tuple(pickles))
    if file_name.lower().endswith(_ARCHIVE_SUFFIXES):
        _refuse("archive_nested", f"{_quote(name)} is an archive inside the archive; remove it")
    _refuse(
        "archive_unknown_file",
        f"{_quote(name)} is not a file of an adapter that this server knows; remove it from the archive if the "
        "adapter does not need it",
    )


def _check_case(name: str, file_name: str) -> None:
    meant = file_name.lower().strip(" .")
    if meant in MEMBER_NAMES and file_name not in MEMBER_NAMES:
        _refuse("archive_name", f"the archive's member {_quote(name)} must be named {meant!r}")


class _BoundedReads:
    """A file for zipfile that limits the size of each read. zipfile reads the central directory in one read, whose size
    the untrusted archive states.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = _MAX_ZIP_READ_BYTES
        if size > _MAX_ZIP_READ_BYTES:
            _refuse(
                "archive_members",
                f"the archive's list of members takes {size} bytes; at most {_MAX_ZIP_READ_BYTES} are "
                "accepted: remove the files that do not belong to the adapter",
            )
        return self._file.read(size)


def _zip_members(file: BinaryIO) -> Iterator[Member]:
    with zipfile.ZipFile(cast(IO[bytes], _BoundedReads(file))) as archive:
        for info in archive.infolist():
            # zipfile's `filename` may be truncated at a NUL, or replaced by the name in an extra field.
            name = info.orig_filename
            yield Member(
                name, info.file_size, info.is_dir(), _zip_oddity(info), partial(_read_zip, archive, info)
            )


def _zip_oddity(info: zipfile.ZipInfo) -> str | None:
    kind = (info.external_attr >> 16) & _S_IFMT
    if kind not in (0, _S_IFREG, _S_IFDIR):
        return "a symbolic link" if kind == _S_IFLNK else "a special file"
    if info.flag_bits & _ENCRYPTED:
        return "encrypted"
    if info.compress_type not in _ZIP_METHODS:
        return f"compressed by method {info.compress_type} instead of deflate"
    if info.filename != info.orig_filename:
        return "stored with a second name in another header field"
    return None


def _read_zip(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    # To each offset, zipfile adds the number of bytes that precede the archive, and does not check the sum.
    if info.header_offset < 0:
        raise zipfile.BadZipFile(f"file {info.orig_filename!r} starts before the archive")
    with archive.open(info) as content:
        while chunk := content.read(_CHUNK_BYTES):
            yield chunk


def _quote(name: str) -> str:
    return ascii(name if len(name) <= 120 else name[:117] + "...")


_BLOCK_BYTES = 512
# A tar ends with two blocks of zeros.
_END_BYTES = 2 * _BLOCK_BYTES
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

    def __init__(self, file: BinaryIO | gzip.GzipFile, max_bytes: int) -> None:
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


@dataclass(slots=True)
class _Extension:
    """Fields of the next member's header that extension headers override. None means not overridden."""

    name: str | None = None
    size: int | None = None
    is_sparse: bool = False


def read_tar(file: BinaryIO | gzip.GzipFile, max_bytes: int) -> Iterator[Member]:
    """Yields the members in `file`, which is read in one pass, only forward. The size of all headers is limited.

    Supported formats are POSIX ustar and pax, GNU tar's long names, and pre-POSIX tars. Uploads are not read with
    Python's `tarfile`. It takes a damaged header, a cut between members or a pax size that is no number for the end of
    the archive, so it would silently serve an adapter without some of its files. It also recurses once for each
    consecutive header, and parses headers of any length and number. Here headers are counted before they are read, so
    the work is proportional to the content of the members.

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


_MAX_BASE_NAME_CHARS = 256


def inspect(source: Path, scratch: Path, shape: ModelShape, limits: AdapterLimits) -> CheckedAdapter:
    """Checks and summarises the adapter in `source`, a PEFT directory or an archive of one.

    scratch: an empty directory for all output; the result may refer to files in it. Raises AdapterInvalid.
    """
    directory = source
    if source.is_file():
        directory = scratch / "unpacked"
        directory.mkdir()
        unpack(source, directory, limits.max_tensor_bytes)
    adapter = read_adapter(directory, shape, limits)
    _refuse_without_effect(adapter)
    return summarise(adapter, directory, scratch, shape, _read_base_name(directory))


def _refuse_without_effect(adapter: Adapter) -> None:
    """Refuses an adapter in which every module has a zero factor. PEFT initialises B with zeros, so this happens when
    an adapter is saved before training.
    """
    factors = ((pair.a.values, pair.b.values) for pair in adapter.pairs.values())
    if all(0 in map(largest_magnitude_bits, pair) for pair in factors):
        message = (
            f"lora_A or lora_B is zero in each of the {len(adapter.pairs)} modules: the adapter has "
            "no effect and would answer like the base model; save it after training"
        )
        raise AdapterInvalid((Reason("no_effect", message),))


def _read_base_name(directory: Path) -> str | None:
    """Returns the name of the base model in the config, or only its last part if the name is a path."""
    raw = (directory / CONFIG_NAME).read_bytes()
    name = parse_object(raw, source=CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES).get("base_model_name_or_path")
    if not isinstance(name, str):
        return None
    return name.rstrip("/").rpartition("/")[2][:_MAX_BASE_NAME_CHARS] or None


class OutOfMemory(Exception):
    """The inspection exceeded its memory limit."""


@dataclass(frozen=True, slots=True)
class InspectionTask:
    """The arguments of `inspect`, and the limits of the process."""

    source: Path
    scratch: Path
    shape: ModelShape
    limits: AdapterLimits
    memory_bytes: int  # limit on private memory; mapped files are not counted
    cpu_seconds: int  # limit on CPU time
    parent: int  # id of the process that waits for the answer

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def from_json(text: str) -> "InspectionTask":
        fields = json.loads(text)
        limits = fields["limits"]
        base = limits["base_directory"]
        return InspectionTask(
            **{
                **fields,
                "source": Path(fields["source"]),
                "scratch": Path(fields["scratch"]),
                "shape": ModelShape.from_plain(fields["shape"]),
                "limits": AdapterLimits(
                    **{
                        **limits,
                        "base_directory": base and Path(base),
                        "tokenizer_digests": tuple(limits["tokenizer_digests"]),
                    }
                ),
            }
        )


def _bound(task: InspectionTask) -> None:
    """Sets the kernel's limits on this process."""
    die_with(task.parent)
    # A core file could fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The soft limit sends SIGXCPU, which the server recognises. The hard limit sends SIGKILL, which can also have other
    # causes.
    resource.setrlimit(resource.RLIMIT_CPU, (task.cpu_seconds, task.cpu_seconds + 5))
    # RLIMIT_AS would also count mapped files, such as the files of the base model.
    resource.setrlimit(resource.RLIMIT_DATA, (task.memory_bytes, task.memory_bytes))


def _answer(task: InspectionTask) -> dict[str, object]:
    try:
        return {"adapter": asdict(inspect(task.source, task.scratch, task.shape, task.limits))}
    except AdapterInvalid as error:
        return {"reasons": [[reason.code, reason.message] for reason in error.reasons]}
    except MemoryError:
        return {"out_of_memory": True}
    except OSError as error:
        if not is_full(error):
            raise
        return {"errno": error.errno}


def decode_answer(line: bytes) -> CheckedAdapter:
    """Decodes the answer of an inspection process and returns the adapter. Raises the error that the answer reports:
    AdapterInvalid, OutOfMemory or OSError. Raises ValueError if the line is not an answer.
    """
    answer: Mapping[str, Any] = json.loads(line)
    if "reasons" in answer:
        raise AdapterInvalid(tuple(Reason(*reason) for reason in answer["reasons"]))
    if "out_of_memory" in answer:
        raise OutOfMemory
    if "errno" in answer:
        raise OSError(answer["errno"], "there was no space to unpack the archive")
    return CheckedAdapter.from_plain(answer["adapter"])


def main() -> None:
    task = InspectionTask.from_json(sys.argv[1])
    _bound(task)
    # `json.dumps` escapes everything except ASCII. A message may quote lone surrogates, which UTF-8 cannot encode.
    sys.stdout.write(json.dumps(_answer(task), default=str) + "\n")


if __name__ == "__main__":
    main()
