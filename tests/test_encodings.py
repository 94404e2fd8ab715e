"""Text files and streams name their encoding. The default one is that of the user's locale, such as Latin-1."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("slora", "kernels", "adapters", "api", "bench", "demo", "docs", "tests")
# Modules whose `open` does not open a text file.
_OTHER_OPENS = {"os", "webbrowser", "tarfile", "zipfile", "asyncio"}
# A call of one of these names, with its arguments up to the third level of parentheses.
_CALL = re.compile(
    r"\b(?P<name>read_text|write_text|run|Popen|check_output|open|fdopen|(?:Named)?TemporaryFile)"
    r"\((?P<arguments>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)?)"
)


def find_defaults(source: str) -> Iterator[int]:
    """Yields the lines of calls that read or write text in the default encoding."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and all(keyword.arg != "encoding" for keyword in node.keywords):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            module = owner.id if isinstance(owner, ast.Name) else ""
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if _is_text(node, name, module, is_method=owner is not None):
                yield node.lineno


def _is_text(call: ast.Call, name: str, module: str, *, is_method: bool) -> bool:
    match name:
        case "read_text":
            return not call.args
        case "write_text":
            return len(call.args) < 2
        case "run" | "Popen" | "check_output":
            return any(one.arg in ("text", "universal_newlines") for one in call.keywords)
        case "open" if module not in _OTHER_OPENS:
            has_name = bool(call.args or call.keywords)
            return has_name and _opens_text(call, position=0 if is_method else 1)
        case "fdopen":
            return _opens_text(call, position=1)
        case "NamedTemporaryFile" | "TemporaryFile":
            return _opens_text(call, position=0, default="w+b")
    return False


def _opens_text(call: ast.Call, position: int, default: str = "r") -> bool:
    given = [one.value for one in call.keywords if one.arg == "mode"] or call.args[position : position + 1]
    mode = given[0].value if given and isinstance(given[0], ast.Constant) else None if given else default
    return isinstance(mode, str) and set(mode) <= set("rwxat+")


def _may_use_defaults(source: str) -> bool:
    """Whether a file has to be parsed. To parse all files takes seconds, and most have no call without an encoding."""
    calls = [(call["name"], call["arguments"]) for call in _CALL.finditer(source)]
    texts = [arguments for name, arguments in calls if name != "run" or re.search("text|newlines", arguments)]
    return any("encoding=" not in arguments or not arguments.endswith(")") for arguments in texts)


@pytest.mark.parametrize("folder", FOLDERS)
def test_text_files_and_streams_name_their_encoding(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / folder).rglob("*.py")
        if _may_use_defaults(source := path.read_text(encoding="utf-8"))
        for line in find_defaults(source)
    }
    assert not found, "give these an encoding, such as utf-8"


def test_calls_in_the_default_encoding_are_found() -> None:
    defaults = [
        "path.read_text()",
        "path.write_text(text)",
        "open(name)",
        "open(str(f(g(h(name)))))",
        "path.open('a')",
        "os.fdopen(1, 'w')",
        "subprocess.run(command, text=True)",
        "NamedTemporaryFile('w')",
    ]
    named = [
        "path.read_text('utf-8')",
        "open(name, 'rb')",
        "path.open('a', encoding='utf-8')",
        "os.open(name, 0)",
    ]
    named += ["subprocess.run(command)", "NamedTemporaryFile()", "spending.open()", "path.write_bytes(data)"]
    assert all(_may_use_defaults(source) and list(find_defaults(source)) for source in defaults)
    assert not any(list(find_defaults(source)) for source in named)
