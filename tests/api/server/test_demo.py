"""`slora serve --demo DIR` creates tenants and keys, and prints a curl line for each."""

import json
import shlex
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from slora_api.server.demo import find_demo_adapters, find_demo_directory
from tests.api.conftest import Kit
from tests.api.served import SLORA, Served, environment, running, wait_for


@pytest.fixture(scope="module")
def demo(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo directory of the tiny model."""
    root = tmp_path_factory.mktemp("demo")
    shutil.copytree(kit.base, root / "model")
    for name, source in (("small", kit.small), ("wide", kit.wide)):
        shutil.copytree(source, root / "adapters" / name)
    return root


def start_command(demo: Path, data_dir: Path) -> list[str]:
    flags = ["--port", "0", "--data-dir", str(data_dir), "--pool-bytes", "8MiB", "--kernels", "torch"]
    return [*SLORA, "serve", "--demo", str(demo), *flags]


def run_curl_lines(served: Served) -> dict[str, str]:
    """Sends the request of each printed curl line. Returns the answers by tenant."""
    served.wait_for_line("# tenant wide")
    served.wait_until_ready()
    answers = {}
    lines = list(served.lines)
    for at, line in enumerate(lines):
        if line.startswith("# tenant "):
            words = shlex.split(lines[at + 1])
            headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
            url = next(word for word in words if word.startswith("http"))
            answer = httpx.post(url, headers=headers, content=words[words.index("-d") + 1], timeout=60)
            assert answer.status_code == 200, answer.text
            answers[line.split()[2].rstrip(",")] = answer.json()["choices"][0]["message"]["content"]
    return answers


@dataclass(frozen=True)
class FirstRun:
    """What was seen of a new server whose engine was killed before the demo's adapters were there.

    statuses: the status of each tenant's first request after `/readyz` returned 200.
    answers: the answers to the printed curl lines by tenant.
    """

    data_dir: Path
    keys: dict[str, str]
    statuses: dict[str, int]
    answers: dict[str, str]


@pytest.fixture(scope="module")
def first_run(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    data_dir = tmp_path_factory.mktemp("first-run") / "data"
    with running(start_command(demo, data_dir), environment(), data_dir) as served:
        wait_for(lambda: "demo" in httpx.get(served.url + "/readyz", verify=False).text or None, served.alive)
        served.child("slora.engine.process").kill()
        served.wait_until_ready()
        keys = json.loads((data_dir / "demo-keys.json").read_text())
        statuses = {}
        for tenant, key in keys.items():
            with served.client(key) as client:
                body = {"model": "default", "prompt": "hello", "max_tokens": 1}
                statuses[tenant] = client.post("/v1/completions", json=body).status_code
        return FirstRun(data_dir, keys, statuses, run_curl_lines(served))


def test_readiness_waits_for_the_demos_adapters_even_if_the_engine_dies_meanwhile(
    first_run: FirstRun,
) -> None:
    """Born from a fault: the adapters appeared only seconds after /readyz returned 200."""
    assert first_run.statuses == {"base": 200, "small": 200, "wide": 200}


def test_each_printed_curl_command_is_answered_by_its_adapter_and_keys_are_stable(
    demo: Path, first_run: FirstRun
) -> None:
    answers, data_dir = first_run.answers, first_run.data_dir
    assert set(answers) == {"base", "small", "wide"} and len(set(answers.values())) == 3
    keys_file = data_dir / "demo-keys.json"
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600 and set(first_run.keys) == set(answers)
    with running(start_command(demo, data_dir), environment(), data_dir) as served:
        assert run_curl_lines(served) == answers
    assert json.loads(keys_file.read_text()) == first_run.keys


def test_a_server_without_demo_mode_keeps_no_key_in_the_clear(server: Served) -> None:
    server.make_key("in-the-clear")
    assert (server.data_dir / "slora.db").exists()
    assert not (server.data_dir / "demo-keys.json").exists()


def test_the_demo_is_found_without_naming_it() -> None:
    adapters = find_demo_adapters(find_demo_directory() / "adapters")
    assert len(adapters) == 10
