"""`slora serve --demo DIR` creates tenants and keys, and prints a curl line for each."""

import json
import shlex
import shutil
import stat
from pathlib import Path

import httpx
import pytest

from slora_api.server.demo import find_demo_adapters, find_demo_directory
from tests.api.conftest import Kit
from tests.api.served import SLORA, Served, environment, running, wait_for


@pytest.fixture
def demo(kit: Kit, tmp_path: Path) -> Path:
    """A demo directory of the tiny model."""
    shutil.copytree(kit.base, tmp_path / "demo" / "model")
    for name, source in (("small", kit.small), ("wide", kit.wide)):
        shutil.copytree(source, tmp_path / "demo" / "adapters" / name)
    return tmp_path / "demo"


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


def test_each_printed_curl_line_gets_its_own_adapters_answer_and_keys_stay_the_same(
    demo: Path, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    with running(start_command(demo, data_dir), environment(), data_dir) as served:
        answers = run_curl_lines(served)
    assert set(answers) == {"base", "small", "wide"} and len(set(answers.values())) == 3

    keys_file = data_dir / "demo-keys.json"
    keys = json.loads(keys_file.read_text())
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600 and set(keys) == set(answers)
    with running(start_command(demo, data_dir), environment(), data_dir) as served:
        assert run_curl_lines(served) == answers
    assert json.loads(keys_file.read_text()) == keys


def test_readiness_waits_for_the_demos_adapters_even_if_the_engine_dies_meanwhile(
    demo: Path, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    with running(start_command(demo, data_dir), environment(), data_dir) as served:
        wait_for(lambda: "demo" in httpx.get(served.url + "/readyz", verify=False).text or None, served.alive)
        served.child("slora.engine.process").kill()
        served.wait_until_ready()
        # Born from a fault: the adapters appeared only seconds after /readyz returned 200.
        for tenant, key in json.loads((data_dir / "demo-keys.json").read_text()).items():
            with served.client(key) as client:
                body = {"model": "default", "prompt": "hello", "max_tokens": 1}
                assert client.post("/v1/completions", json=body).status_code == 200, tenant
        assert len(set(run_curl_lines(served).values())) == 3


def test_a_server_without_demo_mode_keeps_no_key_in_the_clear(demo: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    command = [*SLORA, "serve", "--port", "0", "--model", str(demo / "model"), "--data-dir", str(data_dir)]
    with running(command, environment(SLORA_ADMIN_KEY="the-operators-own-key"), data_dir) as served:
        served.wait_for_line("listening on")
    assert not (data_dir / "demo-keys.json").exists()


def test_the_demo_is_found_without_naming_it() -> None:
    adapters = find_demo_adapters(find_demo_directory() / "adapters")
    assert len(adapters) == 10
