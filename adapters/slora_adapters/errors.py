"""The exception tree of the whole project, and the adapters' branch of it.

    SloraError                 anything that slora raises on purpose
    └── AdapterError           something about one adapter
        ├── AdapterInvalid     its files break a rule; carries every reason found, not just the first
        ├── AdapterNotFound    no such name, version or blob
        ├── AdapterInUse       not deleted: aliases point at it
        ├── BadAdapterName     a name that no adapter can have
        ├── BadAlias           an alias that can't be, or can't point there
        ├── AliasConflict      the alias is not where the caller thinks it is
        ├── AdapterCorrupt     stored bytes are not the ones that were put there
        └── StoreUnavailable   the place that holds adapters does not answer
            ├── DiskFull       there is no room for what was to be written
            ├── StoreUnfit     it answers, but is set up so that it could lose them: only a person can help
            └── TryAgain       it answers, but this could not be done now

Further branches (requests, engine, keys) hang below `SloraError` in their own packages.
"""

from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "AdapterCorrupt",
    "AdapterError",
    "AdapterInUse",
    "AdapterInvalid",
    "AdapterNotFound",
    "AliasConflict",
    "BadAdapterName",
    "BadAlias",
    "DiskFull",
    "Reason",
    "SloraError",
    "StoreUnavailable",
    "StoreUnfit",
    "TryAgain",
]


class SloraError(Exception):
    """Root of all errors that slora raises on purpose."""


class AdapterError(SloraError):
    """Something is wrong with one adapter; other adapters are not affected."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One rule that an adapter breaks: `code` is stable for programs, `message` is for people."""

    code: str
    message: str


class AdapterInvalid(AdapterError):
    """The adapter's files break at least one rule; `reasons` holds all that were found."""

    def __init__(self, reasons: tuple[Reason, ...]) -> None:
        super().__init__("; ".join(reason.message for reason in reasons))
        self.reasons = reasons


class AdapterNotFound(AdapterError):
    """No adapter has this name, or no store holds this version."""


class AdapterInUse(AdapterError):
    """It is not deleted, because these aliases of the name point at it."""

    def __init__(self, what: str, aliases: tuple[str, ...]) -> None:
        super().__init__(
            f"{', '.join(aliases)} of {what!r} would point nowhere; move or delete them, or force it"
        )
        self.aliases = aliases


class BadAdapterName(AdapterError):
    """The text cannot be the name of an adapter, or refer to one."""


class BadAlias(AdapterError):
    """The text cannot be an alias, or it cannot point where it is told to."""


class AliasConflict(AdapterError):
    """The alias has moved since the caller looked, or was never moved at all."""


class AdapterCorrupt(AdapterError):
    """What the store returned does not hash to the digest that it was asked for."""


class StoreUnavailable(AdapterError):
    """A store or the database does not answer; it may later. The text is for operators: it may name hosts and paths."""

    @property
    def public_message(self) -> str:
        """For tenants."""
        return "the place where adapters are kept does not answer as it should; try again shortly"


class DiskFull(StoreUnavailable):
    """There was no room for what was to be written, and nothing was changed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            f"the disk of {directory} is full, so this change is refused: free some room there and try again. Requests "
            "are still answered, and keys can be revoked."
        )

    @property
    def public_message(self) -> str:
        return (
            "This server's disk is full, so this change is refused. Its operator has to free some room in the data "
            "directory (--data-dir) or the store (--store); try again then."
        )


class TryAgain(StoreUnavailable):
    """It answers, but this could not be done now. The client is told why; the message names no host and no path."""

    @property
    def public_message(self) -> str:
        return str(self)


class StoreUnfit(StoreUnavailable):
    """A store is set up so that it could lose what is put there; the message names what to set."""
