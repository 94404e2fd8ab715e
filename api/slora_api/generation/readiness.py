"""The reasons why this server cannot answer. The supervisor and the startup code report the reasons. /readyz and new
requests read them.
"""

from dataclasses import dataclass, field

__all__ = ["Readiness"]


@dataclass(slots=True)
class Readiness:
    """The current reasons why this server cannot answer, by name.

    stalls: child process -> a sentence for the client, for each child that makes no progress. While a child is listed,
    new requests are refused.
    unfinished: part of the startup -> a sentence, for each part that is not finished, such as the demo's adapters.
    Requests are still accepted.
    """

    stalls: dict[str, str] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)

    @property
    def stall(self) -> str | None:
        return next(iter(self.stalls.values()), None)

    @property
    def missing(self) -> str | None:
        return self.stall or next(iter(self.unfinished.values()), None)
