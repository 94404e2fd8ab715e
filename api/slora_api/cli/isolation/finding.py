"""What a probe found."""

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One cell of the audit.

    expected: what an isolated server answers. seen: what this server answered.
    """

    probe: str
    cell: str
    expected: str
    seen: str
    ok: bool
