"""The whole system as users see it: OpenAI's client, the command line, and a comparison with peft's answers."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.api.command import Ended, run_command
from tests.api.conftest import Kit
from tests.api.platform import FIELDS
from tests.api.served import ADMIN_KEY, CHARACTERS, EOS, SLORA, Served, environment
from tests.support.hub import COMMIT, adapter_files, lay_out_snapshot
from tests.support.oracle import Oracle
from tests.support.tiny_models import write_model

PROMPTS = ["hello", "The quick brown fox", "0123456789" * 7, "a", "?"]


def upload(server: Served, key: str, name: str, directory: Path) -> httpx.Response:
    files = {FIELDS[path.name]: path.open("rb") for path in directory.iterdir() if path.name in FIELDS}
    try:
        with server.client(key) as client:
            return client.post("/v1/adapters", data={"name": name}, files=files)
    finally:
        for file in files.values():
            file.close()


@pytest.fixture(scope="module")
def key(server: Served, kit: Kit) -> str:
    """The key of a tenant with both adapters. Its default adapter is `small`."""
    made = server.make_key("acme", "small")
    for name in ("small", "wide"):
        assert upload(server, made, name, kit.small.parent / name).status_code == 201
    return made


@pytest.fixture(scope="module")
def client(server: Served, key: str) -> openai.OpenAI:
    return server.sdk(key)


def greedy(client: openai.OpenAI, model: str, prompt: str, max_tokens: int = 24) -> str:
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def greedy_tokens(client: openai.OpenAI, model: str, prompt: str) -> list[int]:
    """The generated tokens. The end token is ignored here and is not part of the text."""
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=24, temperature=0, logprobs=0, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    return [EOS if token == "<eos>" else CHARACTERS.index(token) for token in logprobs.tokens]


def test_every_model_embeds_what_peft_computes(client: openai.OpenAI, kit: Kit) -> None:
    oracle = Oracle(kit.base, {"small": kit.small, "wide": kit.wide})
    for model, adapter in (("base", None), ("small", "small"), ("wide", "wide"), ("default", "small")):
        for pooling in ("last", "mean"):
            answer = client.embeddings.create(model=model, input=PROMPTS, extra_body={"pooling": pooling})
            assert answer.usage.total_tokens == sum(map(len, PROMPTS))
            for prompt, one in zip(PROMPTS, answer.data, strict=True):
                expected = oracle.embedding(ids(prompt), adapter, mean=pooling == "mean")
                assert one.embedding == pytest.approx(expected.tolist(), abs=2e-5), (model, pooling, prompt)


def test_every_model_answers_what_peft_answers(client: openai.OpenAI, kit: Kit) -> None:
    oracle = Oracle(kit.base, {"small": kit.small, "wide": kit.wide})
    for model, adapter in (("base", None), ("small", "small"), ("wide", "wide"), ("default", "small")):
        for prompt in PROMPTS:
            tokens = greedy_tokens(client, model, prompt)
            assert len(tokens) == 24
            assert oracle.judge(ids(prompt), tokens, adapter).equal, (model, prompt)


def test_requests_of_all_models_at_once_answer_as_one_at_a_time(client: openai.OpenAI) -> None:
    wanted = [(model, prompt) for model in ("base", "small", "wide", "default") for prompt in PROMPTS]
    alone = [greedy(client, *pair) for pair in wanted]
    with ThreadPoolExecutor(len(wanted)) as pool:
        assert list(pool.map(lambda pair: greedy(client, *pair), wanted)) == alone
    assert len(set(alone)) > len(PROMPTS) * 2


def test_chat_streams_and_answers_alike(client: openai.OpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    options = {"ignore_eos": True}
    whole = client.chat.completions.create(
        model="default", messages=messages, max_completion_tokens=12, temperature=0, extra_body=options
    )
    with client.chat.completions.create(
        model="default", messages=messages, max_tokens=12, temperature=0, stream=True, extra_body=options
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and len(text) == 12
    assert whole.usage is not None and whole.usage.prompt_tokens == len("[system]be brief[user]hello")


def command(server: Served, *arguments: str, **variables: str) -> Ended:
    """Runs `slora` with the given arguments against the server, in this process."""
    return run_command(*arguments, **{"SLORA_URL": server.url, **variables})


def test_the_command_line_leads_from_nothing_to_an_answer(server: Served, kit: Kit) -> None:
    operator = {"SLORA_ADMIN_KEY": ADMIN_KEY}
    assert command(server, "tenant", "create", "cli", **operator).stdout == "cli\n"
    assert "cli" in command(server, "tenant", "list", **operator).stdout.split()
    share = ("--weight", "2.5", "--max-pool-share", "0.5", "--priority", "-1")
    heading, line = command(server, "tenant", "set", "cli", *share, **operator).stdout.splitlines()
    assert heading.split() == ["TENANT", "STATUS", "WEIGHT", "MIN", "POOL", "MAX", "POOL", "PRIORITY"]
    assert line.split() == ["cli", "active", "2.5", "0", "0.5", "-1"]
    listed = json.loads(command(server, "tenant", "list", "--json", **operator).stdout)
    assert [one["weight"] for one in listed if one["name"] == "cli"] == [2.5]
    idle = command(server, "tenant", "set", "cli", **operator)
    assert idle.returncode == 1 and "--min-pool-share" in idle.stderr
    key = command(server, "key", "create", "cli", "--adapter", "voice", **operator).stdout.strip()
    tenant = {"SLORA_API_KEY": key}
    base = ("--base", str(kit.base))
    pushed = command(server, "adapter", "push", str(kit.wide), "--name", "voice", *base, **tenant)
    assert pushed.returncode == 0 and pushed.stdout.startswith("voice@1  new version\n"), pushed.stderr
    assert "rank         16;" in pushed.stdout and "base model   verified;" in pushed.stdout
    assert pushed.stdout.endswith('Call it with model="voice".\n')
    again = command(server, "adapter", "push", str(kit.wide), "--name", "voice", "--json", **tenant)
    assert json.loads(again.stdout)["new_version"] is False
    (listed,) = json.loads(command(server, "adapter", "list", "--json", **tenant).stdout)
    assert (listed["name"], listed["version"], listed["pinned"]) == ("voice", 1, False)
    pinned = command(server, "adapter", "pin", "voice", "--tenant", "cli", **operator)
    assert pinned.returncode == 0 and pinned.stdout.splitlines()[1].split()[5] == "yes"
    assert command(server, "adapter", "list", **tenant).stdout == pinned.stdout
    unpinned = command(server, "adapter", "unpin", "voice", "--tenant", "cli", **operator)
    assert unpinned.stdout.splitlines()[1].split()[5] == "no"
    nobodys = command(server, "adapter", "pin", "voice", "--tenant", "nobody", **operator)
    assert (nobodys.returncode, nobodys.stderr) == (1, "slora: There is no tenant `nobody`.\n")

    limits = ("--temperature", "0", "--max-tokens", "10")
    said = command(server, "complete", "hello", "--raw", *limits, **tenant)
    client = server.sdk(key)
    plain = client.completions.create(model="voice", prompt="hello", temperature=0, max_tokens=10)
    assert said.stdout == plain.choices[0].text + "\n"
    chatted = command(server, "complete", "hi", "--temperature", "0", "--max-tokens", "9", **tenant)
    assert chatted.returncode == 0 and chatted.stdout

    kept = command(server, "adapter", "rm", "voice@1", **tenant)
    assert kept.returncode == 1 and "use --force" in kept.stderr
    assert command(server, "adapter", "rm", "voice", **tenant).returncode == 0
    gone = command(server, "complete", "hello", **tenant)
    assert (gone.returncode, gone.stdout, gone.stderr) == (
        1,
        "",
        "slora: The model `voice` does not exist.\n",
    )

    key_id = key.split("_")[1]
    assert key_id in command(server, "key", "list", "cli", **operator).stdout
    assert command(server, "key", "revoke", key_id, **operator).returncode == 0
    refused = command(server, "adapter", "list", **tenant)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "API key" in refused.stderr


def test_an_adapter_of_the_hub_is_pushed_by_its_repositorys_name_and_reported_by_its_commit(
    server: Served, kit: Kit, tmp_path: Path
) -> None:
    lay_out_snapshot(tmp_path / "hub", "org/voice-2", adapter_files(kit.wide))
    # huggingface_hub reads the variables when it is imported, so each command that uses it is a process of its own.
    variables = {"SLORA_API_KEY": server.make_key("cli-hub"), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = environment(**{"SLORA_URL": server.url, **variables})
        return subprocess.run([*SLORA, *arguments], env=env, capture_output=True, encoding="utf-8")

    pushed = run("adapter", "push", "hf://org/voice-2@main")
    assert pushed.returncode == 0, pushed.stderr
    first, *_, origin = pushed.stdout.splitlines()
    assert (
        first == "voice-2@1  new version"
        and origin == f"The adapter was downloaded from hf://org/voice-2@{COMMIT}."
    )
    listed = command(server, "adapter", "list", SLORA_API_KEY=variables["SLORA_API_KEY"])
    assert listed.stdout.splitlines()[1].split()[0] == "voice-2"
    refused = command(server, "adapter", "push", "hf://org", SLORA_API_KEY=variables["SLORA_API_KEY"])
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    assert "hf://ORG/REPO" in refused.stderr


def test_an_archive_is_pushed_under_its_own_name_and_another_base_is_refused(
    server: Served, kit: Kit, tmp_path: Path
) -> None:
    archive = shutil.make_archive(str(tmp_path / "small-one"), "gztar", kit.small.parent, "small")
    key = {"SLORA_API_KEY": server.make_key("packer")}
    pushed = command(server, "adapter", "push", archive, **key)
    assert pushed.returncode == 0 and pushed.stdout.startswith("small-one@1  new version"), pushed.stderr
    write_model(tmp_path / "other", "llama", seed=5)
    refused = command(server, "adapter", "push", archive, "--base", str(tmp_path / "other"), **key)
    assert (
        refused.returncode == 1
        and "other_base: the adapter was trained on a base model with" in refused.stderr
    )
    unnamed = command(server, "adapter", "push", archive, "--name", "", **key)
    assert unnamed.returncode == 1 and "--name is empty" in unnamed.stderr
    pickled = tmp_path / "pickled"
    shutil.copytree(kit.small, pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    refused = command(server, "adapter", "push", str(pickled), **key)
    assert refused.returncode == 1 and "a pickle, which is never loaded; save the adapter" in refused.stderr
    nothing = command(server, "adapter", "push", archive, "--base", str(tmp_path), **key)
    assert nothing.returncode == 1 and "has no model.safetensors" in nothing.stderr


def test_a_command_that_cannot_work_says_why_in_one_line(server: Served, tmp_path: Path) -> None:
    cases = [
        (("tenant", "create", "x"), {}, "SLORA_ADMIN_KEY is not set"),
        (("adapter", "list"), {}, "SLORA_API_KEY is not set"),
        (("adapter", "push", str(tmp_path)), {"SLORA_API_KEY": "k"}, "no adapter_config.json"),
        (
            ("adapter", "list"),
            {"SLORA_API_KEY": "k", "SLORA_URL": "http://127.0.0.1:9"},
            "check that the server is running",
        ),
        (("complete", "x", "--system", "y", "--raw"), {"SLORA_API_KEY": "k"}, "omit --raw"),
    ]
    for arguments, variables, words in cases:
        done = command(server, *arguments, **variables)
        assert done.returncode == 1 and done.stdout == "", arguments
        assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_refused_push_prints_the_servers_reasons(server: Served, kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(
        (kit.small / "adapter_model.safetensors").read_bytes()
    )
    config = json.loads((kit.small / "adapter_config.json").read_text(encoding="utf-8"))
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({**config, "use_qalora": True}), encoding="utf-8"
    )
    done = command(
        server, "adapter", "push", str(tmp_path), "--name", "x", SLORA_API_KEY=server.make_key("cli-bad")
    )
    assert done.returncode == 1 and done.stderr.count("QALoRA") == 1, done.stderr


def test_a_certificate_predicts_loads_from_how_they_went_and_how_large_the_adapter_is(
    server: Served, kit: Kit
) -> None:
    key = server.make_key("predicted")
    first = upload(server, key, "small", kit.small).json()["certificate"]
    assert all(milliseconds > 0 for milliseconds in first["predicted_load_ms"].values())
    upload(server, key, "wide", kit.wide)
    # A cached adapter is not loaded again. Each load changes the measured paces a little, so only the order is certain.
    certificates = [
        upload(server, key, path.name, path).json()["certificate"] for path in (kit.small, kit.wide)
    ]
    small, wide = (certificate["predicted_load_ms"] for certificate in certificates)
    assert small.keys() == {"host", "file"} and small["file"] > small["host"]
    assert certificates[1]["pool_bytes"] > certificates[0]["pool_bytes"]
    assert all(wide[tier] > small[tier] for tier in wide)
