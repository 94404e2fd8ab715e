"""The tar reader finds the same members as Python's tarfile, and its work before each member is bounded."""

import gzip
import io
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_adapters.errors import AdapterInvalid
from slora_adapters.inspection.inspection_process import read_tar

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
MAX_BYTES = 64 << 20


def read_all(raw: bytes, max_bytes: int = MAX_BYTES) -> list[tuple[str, bytes]]:
    found = []
    for member in read_tar(io.BytesIO(raw), max_bytes):
        found.append((member.name, b"".join(member.read())))
    return found


def write(entries: list[tuple[str, bytes]], form: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, raw in entries:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(raw), 1.5 if form == tarfile.PAX_FORMAT else 1
            archive.addfile(info, io.BytesIO(raw))
    return buffer.getvalue()


# The header of a tar holds names of up to 100 bytes, and some names of up to 255 bytes. It holds no longer name.
NAMES = st.text("abcé", min_size=1, max_size=130).map(lambda text: "/".join((text[:20], text[20:], "x" * 30)))
MEMBERS = st.lists(
    st.tuples(NAMES | st.text("ab", min_size=1, max_size=99), st.binary(max_size=1500)), max_size=5
)


@pytest.mark.parametrize("form", FORMATS)
@given(entries=MEMBERS)
def test_the_members_are_those_that_were_written(form: str, entries: list[tuple[str, bytes]]) -> None:
    try:
        raw = write(entries, FORMATS[form])
    except ValueError:
        return  # the name is too long for this format
    assert read_all(raw) == entries


@pytest.mark.parametrize("form", FORMATS)
def test_members_need_not_be_read(form: str) -> None:
    raw = write(
        [("a", b"x" * 1000), ("b" * 300, b"y"), ("c", b"")][: 3 if form != "ustar" else 1], FORMATS[form]
    )
    names = [member.name for member in read_tar(io.BytesIO(raw), MAX_BYTES)]
    assert names[0] == "a" and len(names) == (1 if form == "ustar" else 3)


def test_a_tar_of_before_posix_is_read() -> None:
    header = bytearray(write([("folder/", b""), ("folder/file", b"old")], tarfile.USTAR_FORMAT))
    for at in (0, 512):
        header[at + 156 : at + 157] = b"\0"
        header[at + 257 : at + 512] = bytes(255)
        header[at + 148 : at + 156] = b" " * 8
        header[at + 148 : at + 156] = b"%06o\0 " % sum(header[at : at + 512])
    members = list(read_tar(io.BytesIO(bytes(header)), MAX_BYTES))
    assert [(member.name, member.is_directory) for member in members] == [
        ("folder/", True),
        ("folder/file", False),
    ]


@given(raw=st.binary(max_size=3000), at=st.integers(0, 4000))
def test_damage_is_an_error_and_nothing_else(raw: bytes, at: int) -> None:
    proper = write([("a" * 120, b"x" * 600), ("b", b"y")], tarfile.PAX_FORMAT)
    damaged = proper[:at] + raw + proper[at + len(raw) :]
    with suppress(ValueError, AdapterInvalid):
        read_all(damaged)


def chained_names() -> bytes:
    one = write([("n" * 300, b"")], tarfile.GNU_FORMAT)[:1024]
    return one * 3000 + write([("a", b"")], tarfile.GNU_FORMAT)


def long_header() -> bytes:
    content = b"13 key=value\n" * 640_000
    info = tarfile.TarInfo("a")
    info.type, info.size = tarfile.XHDTYPE, len(content)
    return info.tobuf() + content + bytes(-len(content) % 512)


@pytest.mark.parametrize("make", [chained_names, long_header])
def test_headers_are_bounded_before_they_are_parsed(make: Callable[[], bytes]) -> None:
    """Born from two findings: a RecursionError that became a 503, and 14 s of CPU time for 8 MB."""
    raw = make()
    before = time.process_time()
    with pytest.raises(AdapterInvalid) as refused:
        read_all(raw)
    assert refused.value.reasons[0].code == "archive_header"
    assert time.process_time() - before < 1.0


def test_decompressed_bytes_are_bounded() -> None:
    bomb = gzip.GzipFile(
        fileobj=io.BytesIO(gzip.compress(write([("a", bytes(4 << 20))], tarfile.PAX_FORMAT)))
    )
    with pytest.raises(AdapterInvalid, match="unpacks to more than 1048576 bytes"):
        list(read_tar(bomb, 1 << 20))
