"""The parts of an answer to a chat: reasoning, content and tool calls."""

from enum import Enum, auto
from typing import NamedTuple


class PieceKind(Enum):
    """The kind of a piece. A CALL begins a tool call, and its text is the tool's name. ARGUMENTS belong to the latest
    call.
    """

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    ARGUMENTS = auto()


class Piece(NamedTuple):
    """One part of an answer. start: for CONTENT, the position of its first character in the answer."""

    kind: PieceKind
    text: str
    start: int = 0
