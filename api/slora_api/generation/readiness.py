"""What keeps this server from answering, as the parts that know report it; /readyz and new requests ask here."""

from dataclasses import dataclass, field

__all__ = ["Readiness"]


@dataclass(slots=True)
class Readiness:
    """stalls: child processes that make no progress, by name, with a sentence for the client; new requests are refused
    meanwhile. unfinished: parts of the start that are still to come, such as the demo's adapters; requests are
    accepted meanwhile."""

    stalls: dict[str, str] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)

    @property
    def stall(self) -> str | None:
        return next(iter(self.stalls.values()), None)

    @property
    def missing(self) -> str | None:
        return self.stall or next(iter(self.unfinished.values()), None)
