"""The usage of one ended request, as one line of a journal.

A line is the CRC-32 of a JSON object, a space, the object and a newline. The object is ASCII, so a line contains no
other newline and no NUL byte.
"""

import json
import zlib
from dataclasses import dataclass, fields

from slora.core.request import RequestUsage

__all__ = ["MAX_LINE_BYTES", "BadLine", "UsageRecord"]

MAX_LINE_BYTES = 2048
_CHECKSUM_CHARS = 8
_encode = json.JSONEncoder(separators=(",", ":")).encode


class BadLine(ValueError):
    """A line of a journal is damaged."""


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """The usage of one request. Writing a record twice is harmless: the ledger counts each request id once,
    with its largest usage.

    request_id: the id that the server chose, which is unique.
    account: the account that is billed within the tenant, as in `EngineRequest.account`.
    adapter_digest: as `EngineRequest.adapter_digests`.
    ended_at: seconds since the epoch.
    is_complete: False if the engine died before it reported the usage. Then only the tokens that the API received are
        counted, and `adapter_bytes` and `page_seconds` are 0.
    is_batch: whether the request was a line of a batch, which costs less.
    """

    request_id: str
    tenant: str
    account: str
    adapter_digest: str | None
    ended_at: float
    usage: RequestUsage
    is_complete: bool = True
    is_batch: bool = False

    def to_line(self) -> bytes:
        values = {name: getattr(self, name) for name in _OWN_FIELDS}
        values |= {name: getattr(self.usage, name) for name in _USAGE_FIELDS}
        body = _encode(values).encode("ascii")
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        assert len(line) <= MAX_LINE_BYTES, f"a usage record has {len(line)} bytes; at most {MAX_LINE_BYTES}"
        return line

    @staticmethod
    def from_line(line: bytes) -> "UsageRecord":
        """Parses a line, with or without its newline. Raises BadLine.

        Ignores unknown fields, which a newer release may have written. A field that an older release did not write has
        its default.
        """
        checksum, _, body = line.removesuffix(b"\n").partition(b" ")
        try:
            if len(checksum) != _CHECKSUM_CHARS or int(checksum, 16) != zlib.crc32(body):
                raise BadLine("the checksum is wrong")
            values = json.loads(body)
            usage = RequestUsage(**{name: values[name] for name in _USAGE_FIELDS})
            own = {name: values[name] for name in _OWN_FIELDS if name != "is_batch" or name in values}
            return UsageRecord(**own, usage=usage)
        except (ValueError, KeyError, TypeError) as error:
            raise BadLine(str(error)) from error


_OWN_FIELDS = tuple(field.name for field in fields(UsageRecord) if field.name != "usage")
_USAGE_FIELDS = tuple(field.name for field in fields(RequestUsage))
