"""The commands and programs in README.md, CONTRIBUTING.md and docs/ work, and the lists there are complete.

Each code block is checked as far as possible without running it. `make soak` runs all that need no GPU, no cloud and no
real model, against the demo.
"""

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from slora.core.engine_config import EngineConfig
from slora_api.completions.schemas import ChatRequest, CompletionRequest
from slora_api.core.settings import Settings
from slora_api.http.request_bounds import RequestBounds
from slora_api.http.unsupported import Unsupported
from tests.adapters.hand_made import make_members
from tests.api.docs.code_block import ROOT, CodeBlock, read_blocks, read_spans, split_command
from tests.api.docs.command_check import find_fault, find_flags
from tests.api.docs.docs_session import DocsSession
from tests.api.platform import ADMIN_KEY, Platform
from tests.api.scripted_engine import ScriptedEngine
from tests.api.served import SLORA, environment, running
from tests.support.tool_templates import HERMES

BLOCKS = read_blocks()
# Python whose names a reader has to define.
SERVING = "docs/serving.md"
SKETCHES = frozenset({"CONTRIBUTING.md"})
# Flags of other programs in code spans.
OTHER_FLAGS = frozenset(
    {
        "--detach", "--build-arg", "--wait", "--profile", "--ulimit", "--strict", "--quick", "--parts", "--peers",
    }
)  # fmt: skip


def find_python(page: str) -> list[CodeBlock]:
    return [block for block in BLOCKS if block.page == page and block.language == "python"]


def find_block_fault(block: CodeBlock) -> str | None:
    """What is wrong with a block, as far as can be told without running it."""
    match block.language:
        case "console":
            faults = [find_fault(words) for command in block.commands() for words in split_command(command)]
            return next(filter(None, faults), None if faults else "it has no command after the prompt $")
        case "python":
            compile(block.text, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        case "json":
            json.loads(block.text)
        case "yaml":
            list(yaml.safe_load_all(block.text))
        case "" | "text" | "nginx":
            return "mark it as console" if block.commands() else None
        case _:
            return f"the language {block.language!r} is not known to this test"
    return None


def test_each_code_block_is_of_a_known_kind_and_well_formed() -> None:
    faults = {block.place: fault for block in BLOCKS if (fault := find_block_fault(block)) is not None}
    assert not faults


def test_each_flag_and_subcommand_in_the_text_exists() -> None:
    unknown = [
        (page, word)
        for page, span in read_spans()
        if span.startswith(("--", "slora "))
        for word in span.split()
        if word.startswith("--") and word.partition("=")[0].rstrip(",.") not in find_flags() | OTHER_FLAGS
    ]
    assert unknown == []


def test_the_page_on_serving_names_each_field_that_a_request_may_have() -> None:
    text = "".join(
        (ROOT / SERVING).read_text(encoding="utf-8").partition("## Which request fields are supported?")[1:]
    )
    for schema in (CompletionRequest, ChatRequest):
        for name, field in schema.model_fields.items():
            is_honoured = not any(isinstance(note, Unsupported) for note in field.metadata)
            assert not is_honoured or f"`{name}`" in text, name


def test_the_page_on_limits_has_each_bound_of_a_request_with_its_value() -> None:
    engine = EngineConfig(Path("base"))
    bounds = RequestBounds.of(Settings(engine), ScriptedEngine(max_model_len=131_072).info, 16)
    rows = {
        row.split("`")[1]: row
        for row in (ROOT / "docs/limits.md").read_text(encoding="utf-8").splitlines()
        if row.startswith("| `")
    }
    derived = {"max_model_len", "prompt_chars", "choices"}  # Their rows say from what.
    for name, value in asdict(bounds).items():
        shown = (f"{value:,}", f"{value >> 20} MiB", f"{value >> 10} KiB")
        assert name in rows and (name in derived or any(text in rows[name] for text in shown)), (name, value)


@pytest.fixture(scope="module")
def platform(start_platform: Callable[..., Platform]) -> Platform:
    return start_platform(ScriptedEngine(max_model_len=4096), runs_batches=True)


@pytest.fixture
def session(platform: Platform, tmp_path: Path) -> DocsSession:
    session = DocsSession(platform.url, ADMIN_KEY, platform.directory, tmp_path / "work")
    session.make_folder()
    return session


@pytest.mark.parametrize("page", ["docs/limits.md", "docs/console.md"])
def test_the_curl_commands_of_a_page_are_answered(
    page: str, platform: Platform, session: DocsSession
) -> None:
    for block in BLOCKS:
        if block.page == page and block.language == "console":
            session.run_block(block, platform.key("acme"))


def test_the_first_program_of_the_readme_prints_the_answer(
    platform: Platform, capsys: pytest.CaptureFixture[str], set_variables: Callable[..., None]
) -> None:
    platform.says("THE QUICK BROWN FOX")
    set_variables(SLORA_API_KEY=platform.key("acme"))
    program = find_python("README.md")[0].text.replace("http://127.0.0.1:8000", platform.url)
    names: dict[str, Any] = {}
    exec(program, names)
    names["client"].close()
    assert capsys.readouterr().out == "THE QUICK BROWN FOX\n"


@pytest.fixture(scope="module")
def demo_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocsSession]:
    data_dir = tmp_path_factory.mktemp("demo") / "data"
    # A page restarts one engine after the other.
    command = [*SLORA, "demo", str(ROOT / "demo"), "--model-name", "smollm2-135m", "--port", "0"]
    command += ["--data-dir", str(data_dir), "--replicas", "2"]
    with running(command, environment(SLORA_ADMIN_KEY=ADMIN_KEY), data_dir) as served:
        served.wait_until_ready()
        yield DocsSession(served.url, ADMIN_KEY, data_dir, tmp_path_factory.mktemp("session") / "work")


@pytest.mark.soak
@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_the_commands_of_a_page_work_one_after_the_other(page: str, demo_session: DocsSession) -> None:
    demo_session.make_folder()
    for block in BLOCKS:
        if block.page == page and block.language == "console":
            demo_session.run_block(block, demo_session.prepare(block.text))
        elif block.page == page and block.language == "json" and "messages" in json.loads(block.text):
            demo_session.send_json(block, demo_session.prepare(""))


@pytest.mark.soak
def test_the_python_of_each_other_page_works_with_the_demo(demo_session: DocsSession) -> None:
    for page in sorted({block.page for block in BLOCKS if block.language == "python"} - SKETCHES - {SERVING}):
        demo_session.make_folder()
        demo_session.run_python(find_python(page), demo_session.prepare(""))


@pytest.mark.soak
def test_the_python_of_the_page_on_serving_works(platform: Platform, session: DocsSession) -> None:
    """The demo's model knows neither JSON nor tools, so the answers are scripted."""
    members = make_members() | {"chat_template.jinja": HERMES.encode()}
    platform.upload(platform.key("acme"), "assistant", members).raise_for_status()
    platform.says('{"name": "Ulm", "population": 126000}')
    session.run_python(find_python(SERVING), platform.key("acme", "assistant"))
