"""The code blocks and code spans of README.md, CONTRIBUTING.md and docs/*.md."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_FIRST_CELL = re.compile(r"^\|[^|]*\|", re.MULTILINE)
_PROMPT = "$ "
_OPERATORS = frozenset("();<>|&")


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block. language: the word after the fence, which may be empty. line: the line of the fence."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """The shell commands after the prompt `$`. A quote that is open, or a backslash, continues on the next line."""
        commands: list[str] = []
        lines = iter(self.text.splitlines())
        for line in lines:
            if line.startswith(_PROMPT):
                command = line.removeprefix(_PROMPT)
                while _is_open(command):
                    command += "\n" + next(lines)
                commands.append(command)
        return commands


def _is_open(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return command.endswith("\\")


def split_command(command: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell command, those of `$(...)` included, without variables and files."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    is_file = False
    for word in lexer:
        if set(word) <= _OPERATORS:
            if words:
                yield words
            words, is_file = [], word.startswith((">", "<"))
        elif is_file:
            is_file = False
        elif words or not re.fullmatch(r"\w+=.*", word, re.DOTALL):
            words.append(word)
    if words:
        yield words


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def read_blocks() -> list[CodeBlock]:
    return [
        CodeBlock(str(page.relative_to(ROOT)), text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for page in pages()
        for text in [page.read_text(encoding="utf-8")]
        for match in _FENCE.finditer(text)
    ]


def read_spans() -> Iterator[tuple[str, str]]:
    """Page and text of each code span outside the blocks, without the flags of other servers."""
    for page in pages():
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        if page.name == "migration.md":
            text = _FIRST_CELL.sub("|", text)
        for span in _SPAN.findall(text):
            yield str(page.relative_to(ROOT)), " ".join(span.split())
