"""The reasons why this server cannot answer. The supervisor and the startup code report the reasons. /readyz and new
requests read them.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Readiness:
    """The current reasons why this server cannot answer, by name.

    stalls: child process -> a sentence for the client, for each child that makes no progress. While a child is listed,
    new requests are refused, unless the child is an engine and another engine is not listed.
    engines: the names of the engine processes.
    unfinished: part of the startup -> a sentence, for each part that is not finished, such as the demo's adapters.
    Requests are still accepted.
    """

    stalls: dict[str, str] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)
    engines: frozenset[str] = frozenset()

    @property
    def stall(self) -> str | None:
        can_compute = bool(self.engines - self.stalls.keys())
        return next(
            (reason for name, reason in self.stalls.items() if not (can_compute and name in self.engines)),
            None,
        )

    @property
    def missing(self) -> str | None:
        return self.stall or next(iter(self.unfinished.values()), None)
