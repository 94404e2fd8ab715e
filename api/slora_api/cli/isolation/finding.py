"""The result of one check of a probe."""

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of the audit, which the output calls a cell.

    expected: what an isolated server answers. seen: what this server answered.
    """

    probe: str
    cell: str
    expected: str
    seen: str
    ok: bool
