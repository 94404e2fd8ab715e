"""The messages between API and engine. Both ends use this module.

A message is a dataclass. It travels as the map {"op": name of its class, "fields": its fields}. The frame encodes a
dataclass as the list of its fields (`slora_adapters.process.wire`), and `unpack` restores each field by its annotation.
So a new message needs nothing but its class, and a command of the engine one line of `EngineWorker` that executes it.

API to engine:  commands, which the engine's thread executes between two steps; the engine answers a `Call` with a
                `Reply`. The other messages are for the socket server: Release, Recorded, Served, Drain.
engine to API:  hello (once), Status, Report (about ten times a second), Begun, Outputs (one frame per step), Usage
                (of ended requests, before their last outputs), Reply

The hello is a plain map, so that every version of this module can read the version of the other end.
"""

import hashlib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, TypeVar

from slora.core.engine_state import (
    AdapterPlace,
    Backlog,
    EngineInfo,
    EngineReport,
    EngineStats,
    Pin,
    ServiceSpan,
    TenantPurge,
)
from slora.core.errors import (
    EngineUnavailable,
    RequestRefused,
    SloraError,
)
from slora.core.request import EndedRequest, EngineRequest, StepOutput, TenantShare
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import ModelShape

# It grows if a field that exists already gets another meaning. `find_protocol` adds the fields themselves.
_PROTOCOL_VERSION = 28

_Result = TypeVar("_Result")
_Decode = Callable[[Any], Any]
_by_name: dict[str, type["Message"]] = {}


class InvalidMessage(SloraError):
    """The peer sent a frame that is no message of this protocol. The connection must not be used again."""


class Message:
    """A message from one end to the other."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _by_name[cls.__name__] = cls

    def pack(self, **extra: object) -> dict[str, object]:
        return {"op": type(self).__name__, "fields": self, **extra}


def unpack(frame: Any) -> Message:
    """Returns the message of a frame, whose lists it may change. Raises InvalidMessage."""
    op = frame.get("op") if isinstance(frame, dict) else None
    kind = _by_name.get(op) if isinstance(op, str) else None
    # As `is_dataclass`, which takes a microsecond for each frame.
    if kind is None or not hasattr(kind, "__dataclass_fields__"):
        raise InvalidMessage(f"the peer sent the unknown op {op!r}")
    return _decode_as(kind, frame.get("fields"))


def _decode_as(kind: type[_Result], value: Any) -> _Result:
    try:
        decode: _Decode | None = _decoder(kind)  # type: ignore[arg-type]
        found: _Result = value if decode is None else decode(value)
        return found
    except (TypeError, ValueError, LookupError, RequestRefused) as error:
        raise InvalidMessage(f"the peer sent a {kind.__name__} that cannot be read: {error}") from error


class Command(Message):
    """What the engine's thread does between two steps."""

    __slots__ = ()


class Call(Command, Generic[_Result]):
    """A command with a result. Its frame has a `number`, which the reply repeats."""

    __slots__ = ()

    @classmethod
    def read_result(cls, value: Any) -> Any:
        """Restores the result from a `Reply`."""
        (kind,) = typing.get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        return _decode_as(kind, value)


@dataclass(frozen=True, slots=True)
class Add(Command):
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort(Command):
    """Ends one choice of a request, or the whole request if `index` is None."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class RemoveAdapter(Command):
    version: AdapterVersion


@dataclass(frozen=True, slots=True)
class SetPins(Command):
    """Replaces all earlier pins."""

    pins: list[Pin]


@dataclass(frozen=True, slots=True)
class PurgeTenant(Call[TenantPurge]):
    tenant: str


@dataclass(frozen=True, slots=True)
class Prewarm(Call[AdapterPlace]):
    """Loads an adapter before its first request. share: the share of the adapter's tenant."""

    version: AdapterVersion
    share: TenantShare


@dataclass(frozen=True, slots=True)
class Observe(Call[EngineStats]):
    """watched: for a console, the tenants that must be listed. With None, the engine measures no live state."""

    watched: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Release(Message):
    """Other engines continue these requests. This engine drops them without usage."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Recorded(Message):
    """The usage of these requests is durable."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Served(Message):
    """What another engine has charged to tenants. engine: as in its reports."""

    engine: str
    spans: list[ServiceSpan]


@dataclass(frozen=True, slots=True)
class Drain(Message):
    """Tells the engine to drain and to end."""


@dataclass(frozen=True, slots=True)
class Status(Message):
    """loader: whether the loader is connected."""

    loader: bool
    draining: bool


class VersionChanges(NamedTuple):
    """The changes of a set of adapters."""

    added: frozenset[AdapterVersion]
    removed: frozenset[AdapterVersion]

    @staticmethod
    def since(last: frozenset[AdapterVersion], versions: frozenset[AdapterVersion]) -> "VersionChanges":
        if versions is last:
            return _NO_CHANGES
        return VersionChanges(versions - last, last - versions)


_NO_CHANGES = VersionChanges(frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class Report(Message):
    """The changes since the last report to this API process."""

    engine: str  # Identifies this start of the engine.
    num_taken: int  # Number of this process's requests that the engine's thread has taken.
    backlog: Backlog
    resident: VersionChanges
    on_host: VersionChanges
    spans: tuple[ServiceSpan, ...]

    @staticmethod
    def since(last: EngineReport, report: EngineReport, engine: str) -> "Report":
        """The caller sets `num_taken`, which differs between the API processes."""
        return Report(
            engine,
            0,
            report.backlog,
            VersionChanges.since(last.resident, report.resident),
            VersionChanges.since(last.on_host, report.on_host),
            report.spans,
        )


@dataclass(frozen=True, slots=True)
class Begun(Message):
    """Requests that have joined the batch."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Outputs(Message):
    """The outputs of one step. rows: as `StepOutput.to_row` makes them, because most frames are of this kind."""

    rows: list[list[Any]]

    def read(self) -> list[StepOutput]:
        return list(map(StepOutput.from_row, self.rows))


@dataclass(frozen=True, slots=True)
class Usage(Message):
    ended: list[EndedRequest]


@dataclass(frozen=True, slots=True)
class Reply(Message):
    """The result of the call with this number. See `Call.read_result`."""

    number: int
    result: Any


@cache
def find_protocol() -> str:
    """Returns the version of the protocol: a number, and a digest of the fields that travel.

    A frame is a list of fields without names, so two ends whose classes differ in a field do not understand each other.
    """
    messages = (kind for kind in _by_name.values() if kind.__module__ == __name__)
    return f"{_PROTOCOL_VERSION}.{digest_fields([EngineInfo, *messages])}"


def digest_fields(kinds: Iterable[type]) -> str:
    """Returns a digest of the names and types of all fields of the classes, and of the classes that they hold."""
    found: dict[str, str] = {}
    for kind in kinds:
        _find_fields(kind, found)
    return hashlib.sha256("\n".join(sorted(found.values())).encode()).hexdigest()[:8]


def _find_fields(kind: Any, found: dict[str, str]) -> None:
    """Adds the fields of a type, and those of the types that they hold, to `found`: name of the type -> its fields."""
    for held in typing.get_args(kind):
        _find_fields(held, found)
    name = getattr(kind, "__qualname__", "")
    if not isinstance(kind, type) or kind.__module__ == "builtins" or name in found:
        return
    if issubclass(kind, Enum):
        found[name] = f"{name}: {[member.value for member in kind]}"
        return
    for base in getattr(kind, "__orig_bases__", ()):  # The result of a `Call`.
        _find_fields(base, found)
    names: Any = getattr(kind, "_fields", None) or getattr(kind, "__dataclass_fields__", ())
    hints = typing.get_type_hints(kind)
    found[name] = f"{name}: {[(field, str(hints[field])) for field in names]}"
    for field in names:
        _find_fields(hints[field], found)


def encode_info(info: EngineInfo) -> dict[str, Any]:
    """Returns the hello, as plain values that JSON also has."""
    return {"op": "hello", "protocol": find_protocol(), "info": asdict(info)}


def decode_info(message: Mapping[str, Any]) -> EngineInfo:
    """Decodes the hello. Raises EngineUnavailable if the engine uses another version of the protocol."""
    if message.get("protocol") != find_protocol():
        raise EngineUnavailable(
            f"the engine has protocol version {message.get('protocol')}, but this process has "
            f"{find_protocol()}: restart both from the same installation"
        )
    info = dict(message["info"])
    info["shape"] = ModelShape.from_plain(info["shape"])
    info["eos_token_ids"] = tuple(info["eos_token_ids"])
    return EngineInfo(**info)


@cache
def _decoder(kind: Any) -> _Decode | None:
    """Returns the function that restores a value of type `kind`; None if the value arrives as it is."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        decode = _decoder(_drop_none(kind))
        return None if decode is None else lambda value: None if value is None else decode(value)
    if origin in (list, tuple, frozenset):
        each = _decoder(args[0])
        if origin is tuple and args[1:] != (...,):
            assert all(_decoder(item) is None for item in args), f"{kind}: only tuples of plain values"
        if each is None:
            return None if origin is list else origin
        return lambda values: origin([each(value) for value in values])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        item = _decoder(args[1])
        return None if item is None else lambda items: {key: item(value) for key, value in items.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _row_decoder(kind)
    assert kind in (int, float, str, bytes, bool, Any), f"a message cannot hold a {kind}"
    return None


def _row_decoder(kind: Any) -> _Decode:
    """The decoder of a dataclass or a NamedTuple. A frame has hundreds of rows, so it converts them in place."""
    changed: list[tuple[int, _Decode]] | None = None

    def decode_row(row: list[Any]) -> Any:
        nonlocal changed
        if changed is None:  # Not earlier, because a class may have fields of its own kind.
            changed = _find_changed_fields(kind)
        for place, decode in changed:
            if (value := row[place]) is not None:
                row[place] = decode(value)
        return kind(*row)

    return decode_row


def _find_changed_fields(kind: Any) -> list[tuple[int, _Decode]]:
    """Returns the place and the decoder of each field that does not arrive as it is."""
    hints = typing.get_type_hints(kind)
    names = kind._fields if hasattr(kind, "_fields") else kind.__dataclass_fields__
    decoders = ((place, _decoder(_drop_none(hints[name]))) for place, name in enumerate(names))
    return [(place, decode) for place, decode in decoders if decode is not None]


def _drop_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, UnionType):
        (kind,) = (arg for arg in typing.get_args(kind) if arg is not NoneType)
    return kind
