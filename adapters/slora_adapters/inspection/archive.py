"""Unpacks an archive of a PEFT directory (zip, tar, tar.gz) into files with fixed names.

An archive is untrusted. It may contain names that lead outside the directory, links, devices, false sizes, or a
megabyte that expands to a terabyte. So only files that an adapter may have are created, directly in the given
directory. Any other member is skipped or makes the archive invalid. Decompressed bytes are counted, because sizes in
headers are not trusted. The size of the headers is limited before they are parsed.

This module does not interpret the contents of the files.
"""

import gzip
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, NoReturn, cast

from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.inspection.tar_archive import Member, read_tar
from slora_adapters.peft.extras import max_extra_bytes
from slora_adapters.peft.peft_directory import MEMBER_NAMES, TENSORS_NAME, is_harmless, refuse_pickles

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


def _refuse(code: str, message: str) -> NoReturn:
    raise AdapterInvalid((Reason(code, message),))
