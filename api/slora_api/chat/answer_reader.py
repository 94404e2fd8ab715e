"""Divides the text of one answer into reasoning, content and tool calls, as the text arrives."""

import re
from dataclasses import dataclass

from slora_api.chat.call_format import CallBlock, CallFormat
from slora_api.chat.json_calls import Steps, ToolNames
from slora_api.chat.text_reader import NoMatch, Piece, PieceKind, TextReader, Waiting

THINK_START, THINK_END = "<think>", "</think>"

_NEWLINES = re.compile(r"\n*")
# Characters that a model may write between its last call and the closer, such as a surplus bracket.
_BEFORE_CLOSER = re.compile(r"[\s\]}]*")


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """The syntax of the answers to one request.

    thinks: whether an answer may begin with reasoning.
    prompt_thinks: whether the prompt ends within the reasoning, so that the answer begins with it.
    calls: the format of tool calls; None if an answer has none.
    tool_names: the tools of the request.
    max_calls: how many calls are kept; None for no limit. Later calls are dropped.
    names_tool: whether the request names the tool to call. As in OpenAI's API, the finish reason is then `stop`.
    custom_names: the custom tools among `tool_names`, whose input is a text.
    """

    thinks: bool = False
    prompt_thinks: bool = False
    calls: CallFormat | None = None
    tool_names: frozenset[str] = frozenset()
    max_calls: int | None = None
    names_tool: bool = False
    custom_names: frozenset[str] = frozenset()

    @property
    def markers(self) -> frozenset[str]:
        """The markers that the text of an answer shows even if they are special tokens."""
        thinking = frozenset({THINK_START, THINK_END}) if self.thinks else frozenset()
        return thinking if self.calls is None else thinking | self.calls.markers


class AnswerReader:
    """Divides the text of one answer into pieces.

    The concatenated pieces do not depend on how the text is split into deltas. Text that looks like a call but cannot
    be read as a call is content. White space between content and a call is dropped, and so are line breaks around the
    reasoning.
    """

    def __init__(self, syntax: AnswerSyntax) -> None:
        self.num_calls = 0
        # Whether the text so far contains reasoning.
        self.has_thought = False
        # Whether the text so far ends within the reasoning.
        self.is_thinking = False
        self._syntax = syntax
        self._reader = TextReader()
        self._steps = self._read_answer()
        # White space that is held back. In content, it is dropped if a tool call follows, and emitted if more content
        # follows. In reasoning, only line breaks are held back. They are dropped if the reasoning ends, and emitted if
        # more reasoning follows.
        self._space = ""
        self._follows_call = False

    def push(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Adds a part of the text and returns the pieces that no later text can change. Consecutive pieces of the same
        kind are merged, except calls.
        """
        self._reader.add(text)
        self._reader.is_over = is_last
        runs: list[tuple[Piece, list[str]]] = []
        end = 0
        for piece in self._steps:
            if piece is None:
                break
            if not piece.text or self._is_surplus(piece):
                continue
            is_next = piece.kind is not PieceKind.CONTENT or piece.start == end
            if runs and runs[-1][0].kind is piece.kind and piece.kind is not PieceKind.CALL and is_next:
                runs[-1][1].append(piece.text)
            else:
                runs.append((piece, [piece.text]))
            end = piece.start + len(piece.text)
        return [Piece(first.kind, "".join(texts), first.start) for first, texts in runs]

    def _is_surplus(self, piece: Piece) -> bool:
        """Counts the calls. Returns whether the piece belongs to a call beyond `max_calls`."""
        if piece.kind is PieceKind.CALL:
            self.num_calls += 1
        is_call = piece.kind in (PieceKind.CALL, PieceKind.ARGUMENTS)
        most = self._syntax.max_calls
        return is_call and most is not None and self.num_calls > most

    def _read_answer(self) -> Steps:
        if self._syntax.thinks:
            yield from self._read_reasoning()
        if self._syntax.calls is not None:
            yield from self._read_calls(self._syntax.calls)
        else:
            yield from self._read_rest()

    def _read_rest(self) -> Steps:
        reader = self._reader
        while True:
            start = reader.position
            text = reader.advance(len(reader.text))
            reader.release()
            yield Piece(PieceKind.CONTENT, text, start)
            if not (yield from reader.more()):
                return

    def _read_reasoning(self) -> Steps:
        reader = self._reader
        space = yield from reader.skip_space()
        if not (yield from reader.take(THINK_START)) and not self._syntax.prompt_thinks:
            yield Piece(PieceKind.CONTENT, space, reader.position - len(space))
            return
        self.has_thought = self.is_thinking = True
        yield from reader.match(_NEWLINES)
        while (found := reader.text.find(THINK_END, reader.at)) < 0:
            yield from self._emit_reasoning(_partial_end(reader.text, (THINK_END,), reader.at))
            if not (yield from reader.more()):
                yield from self._emit_reasoning(len(reader.text))
                self._space = ""
                return
        yield from self._emit_reasoning(found)
        self._space = ""
        reader.advance(reader.at + len(THINK_END))
        self.is_thinking = False
        yield from reader.match(_NEWLINES)

    def _emit_reasoning(self, end: int) -> Steps:
        """Emits the text before the position `end`, and holds back the line breaks at its end."""
        text = self._reader.advance(end)
        self._reader.release()
        reasoning = text.rstrip("\n")
        if reasoning:
            yield Piece(PieceKind.REASONING, self._space + reasoning)
            self._space = ""
        self._space += text[len(reasoning) :]

    def _read_calls(self, calls: CallFormat) -> Steps:
        reader = self._reader
        if calls.bare is not None:
            reader.hold()
            try:
                self._space = yield from reader.skip_space()
                yield from self._mark_calls(calls.bare(reader, self._names(only_known=True)))
            except NoMatch:
                reader.rewind()
                self._space = ""
        blocks = {block.opener: block for block in calls.blocks}
        openers = re.compile("|".join(map(re.escape, blocks)))
        while True:
            found = openers.search(reader.text, reader.at)
            if found is not None:
                yield from self._read_content(found.start())
                yield from self._read_block(blocks[found[0]])
                continue
            yield from self._read_content(_partial_end(reader.text, tuple(blocks), reader.at))
            if not (yield from reader.more()):
                yield from self._read_content(len(reader.text))
                if not self._follows_call:
                    yield Piece(PieceKind.CONTENT, self._space, reader.position - len(self._space))
                return

    def _read_block(self, block: CallBlock) -> Steps:
        reader = self._reader
        reader.hold()
        reader.advance(reader.at + len(block.opener))
        try:
            yield from self._mark_calls(block.read(reader, self._names(only_known=block.only_known)))
        except NoMatch:
            reader.rewind()
            yield from self._read_content(reader.at + len(block.opener))
            return
        if block.closer:
            yield from self._read_closer(block.closer)

    def _read_closer(self, closer: str) -> Waiting[None]:
        reader = self._reader
        reader.hold()
        try:
            yield from reader.match(_BEFORE_CLOSER)
            if (yield from reader.take(closer)) or not (yield from reader.peek()):
                reader.accept()
                return
        except NoMatch:
            pass
        reader.rewind()

    def _mark_calls(self, steps: Steps) -> Steps:
        for piece in steps:
            if piece is not None and piece.kind is PieceKind.CALL:
                self._space, self._follows_call = "", True
            yield piece

    def _read_content(self, end: int) -> Steps:
        """Emits the text before the position `end` as content, and holds back the white space at its end."""
        text = self._reader.text[self._reader.at : end]
        if not text:
            return
        start = self._reader.position
        self._reader.advance(end)
        self._reader.release()
        content = text.rstrip()
        if self._follows_call and content:
            start += len(content) - len(content.lstrip())
            content = content.lstrip()
            self._space = ""
        if content:
            yield Piece(PieceKind.CONTENT, self._space + content, start - len(self._space))
            self._space, self._follows_call = "", False
        self._space += text[len(text.rstrip()) :]

    def _names(self, *, only_known: bool) -> ToolNames:
        return ToolNames(self._syntax.tool_names, only_known)


def _partial_end(text: str, marks: tuple[str, ...], start: int) -> int:
    """Returns the start of the longest suffix of the text that is a prefix of a mark; the length of the text if there
    is no such suffix.
    """
    first = max(start, len(text) - max(map(len, marks)) + 1)
    tail = text[first:]
    if not any(mark[0] in tail for mark in marks):
        return len(text)
    for at in range(first, len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)


@dataclass(slots=True)
class _Count:
    """The state of one answer. reader: None once the reasoning is over, or if there is none."""

    reader: AnswerReader | None
    num_tokens: int = 0
    num_reasoning: int = 0


class ReasoningCounter:
    """Counts the tokens of the reasoning, including the token that completes the end marker.

    A token is counted when its text arrives. If a stop string begins like the end marker, the marker's text may arrive
    one token late.
    """

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._syntax = AnswerSyntax(syntax.thinks, syntax.prompt_thinks)
        # Choice -> its count.
        self._counts: dict[int, _Count] = {}

    @staticmethod
    def of(syntax: AnswerSyntax | None) -> "ReasoningCounter | None":
        return None if syntax is None or not syntax.thinks else ReasoningCounter(syntax)

    def add(self, choice: int, num_tokens: int, text: str, *, is_last: bool) -> int:
        """Adds the next part of a choice. Returns the increase of the choice's count of reasoning tokens."""
        count = self._counts.get(choice)
        if count is None:
            count = self._counts[choice] = _Count(AnswerReader(self._syntax))
        reader = count.reader
        if reader is None:
            return 0
        count.num_tokens += num_tokens
        has_content = any(reader.push(text, is_last=is_last))
        known = count.num_reasoning
        if reader.has_thought:
            count.num_reasoning = count.num_tokens
        if not reader.is_thinking and (reader.has_thought or has_content):
            count.reader = None
        return count.num_reasoning - known
