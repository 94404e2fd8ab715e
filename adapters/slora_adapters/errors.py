"""The root of the project's exception tree, and its branch for adapters.

    SloraError                 any error that slora raises on purpose
    └── AdapterError           an error of one adapter
        ├── AdapterInvalid     the files break rules; the error lists every reason found
        ├── AdapterNotFound    the name, version or blob does not exist
        ├── AdapterInUse       the version was not deleted, because aliases point at it
        ├── BadAdapterName     the text is not a valid adapter name
        ├── BadAlias           the alias name is not valid, or the alias cannot point there
        ├── AliasConflict      the alias does not point where the caller expects
        ├── AdapterCorrupt     stored bytes differ from the bytes that were stored
        └── StoreUnavailable   a store or the database does not answer
            ├── DatabaseUnavailable  the database does not answer
            ├── DiskFull       the disk has no space for a write
            ├── StoreUnfit     the store's settings allow data loss; the operator must change them
            └── TryAgain       the store answers, but cannot do this now

Further branches (requests, engine, keys) are defined in their own packages, below `SloraError`. `abbreviate` shortens
the values that messages quote, and `find_nearest` finds the name that an unknown one was probably meant to be.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr


class SloraError(Exception):
    """Root of all errors that slora raises on purpose."""


class AdapterError(SloraError):
    """An error of one adapter. Other adapters are not affected."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One rule that an adapter breaks. `code` is stable for programs; `message` is for people."""

    code: str
    message: str


class AdapterInvalid(AdapterError):
    """The adapter's files break at least one rule. `reasons` has all reasons that were found."""

    def __init__(self, reasons: tuple[Reason, ...]) -> None:
        super().__init__("; ".join(reason.message for reason in reasons))
        self.reasons = reasons


class AdapterNotFound(AdapterError):
    """No adapter has this name, or no store holds this version."""


class AdapterInUse(AdapterError):
    """The version or name was not deleted, because `aliases` point at it."""

    def __init__(self, what: str, aliases: tuple[str, ...]) -> None:
        super().__init__(
            f"{what!r} is not deleted, because aliases point at it ({', '.join(aliases)}): move or "
            "delete the aliases, or force the deletion"
        )
        self.aliases = aliases


class BadAdapterName(AdapterError):
    """The text is not a valid adapter name or reference."""


class BadAlias(AdapterError):
    """The text is not a valid alias name, or the alias cannot have these targets."""


class AliasConflict(AdapterError):
    """The alias does not point where the caller expects, or there is no earlier state to roll back to."""


class AdapterCorrupt(AdapterError):
    """The digest of the bytes that the store returned differs from the requested digest, or the stored adapter is not
    valid.
    """


class StoreUnavailable(AdapterError):
    """A store or the database does not answer, but may answer later. The message is for operators, because it may
    contain hosts and paths.
    """

    @property
    def public_message(self) -> str:
        """The message for tenants, without hosts and paths."""
        return "the storage of adapters is unavailable; try again shortly"


class DatabaseUnavailable(StoreUnavailable):
    """The database does not answer, cannot be opened, read or written, or stays locked."""

    @property
    def public_message(self) -> str:
        return "the database of this server is unavailable; try again shortly"


class DiskFull(StoreUnavailable):
    """The disk had no space for a write. Nothing was changed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            f"the disk of {directory} is full, so this change is refused: free some space there and "
            "try again. Requests are still answered, and keys can be revoked."
        )

    @property
    def public_message(self) -> str:
        return (
            "This server's disk is full, so this change is refused. Try again after the operator has "
            "freed space in the data directory (--data-dir) or the store (--store)."
        )


class TryAgain(StoreUnavailable):
    """The store answers, but cannot do this now. The client sees the message, so it contains no host and no path."""

    @property
    def public_message(self) -> str:
        return str(self)


class StoreUnfit(StoreUnavailable):
    """A store or a Redis cannot be used as it is configured. The message says what to change."""


_MAX_CHARS = 80
_MAX_ITEMS = 20


class _JsonRepr(Repr):
    """Writes the values of a JSON text, with null, true and false as JSON writes them."""

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_float(self, value: float, level: int) -> str:
        return json.dumps(value)  # With NaN and Infinity, which Python reads.


_SHORT = _JsonRepr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = _MAX_CHARS
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _MAX_ITEMS


def abbreviate(value: object) -> str:
    """Returns a value, most often of a JSON text, for a message: `repr(value)` with null, true and false, shortened to
    80 characters. The time is bounded, even for very large values.
    """
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def count_nouns(number: int, noun: str) -> str:
    """Returns a number with its noun, as in "1 row" and "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that an unknown one was probably meant to be; None if no name is similar."""
    return next(iter(get_close_matches(name, list(known), 1)), None)
