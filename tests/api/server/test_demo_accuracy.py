"""The demo as a new user runs it: `slora serve --demo demo` with default kernels, and one key for each tenant."""

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from demo.tasks import ADAPTERS, TASKS, unseen_sentences
from slora.models.model_spec_reader import read_model_spec
from slora.text.tokenizer import Tokenizer
from tests.api.served import SLORA, Served, environment, running
from tests.support.oracle import Oracle, Verdict

DEMO = Path(__file__).parents[3] / "demo"
PROMPT = "the quick brown fox"
MAX_TOKENS = 160
LOWEST_ACCURACY = 0.95
NUM_SENTENCES = 20
NUM_JUDGED = 4  # of these are compared with peft; each needs one slow teacher-forced pass


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data_dir = tmp_path_factory.mktemp("demo") / "data"
    command = [*SLORA, "serve", "--demo", str(DEMO), "--port", "0", "--data-dir", str(data_dir)]
    with running(command, environment(), data_dir) as served:
        served.wait_until_ready()
        yield served


@pytest.fixture(scope="module")
def keys(demo: Served) -> dict[str, str]:
    demo.wait_for_line("The same prompt")
    path = demo.data_dir / "demo-keys.json"
    assert path.stat().st_mode & 0o777 == 0o600
    return dict(json.loads(path.read_text()))


def ask(served: Served, key: str, sentence: str) -> str:
    with openai.OpenAI(base_url=served.url + "/v1", api_key=key) as client:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": sentence}],
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
    return answer.choices[0].message.content or ""


def task_of(tenant: str) -> str:
    return ADAPTERS[tenant].task if tenant in ADAPTERS else "echo"


def test_the_same_prompt_is_answered_by_each_keys_own_adapter(demo: Served, keys: dict[str, str]) -> None:
    answers = {tenant: ask(demo, key, PROMPT) for tenant, key in keys.items()}
    assert answers == {tenant: TASKS[task_of(tenant)].apply(PROMPT) for tenant in keys}
    assert len(set(answers.values())) == len(keys) >= 7


def test_an_empty_answer_in_a_terminal_is_explained(demo: Served, keys: dict[str, str]) -> None:
    """The demo model was trained only on chat messages. After any other text it ends its answer at once."""

    def complete(*options: str) -> subprocess.CompletedProcess[str]:
        variables = {"SLORA_URL": demo.url, "SLORA_API_KEY": keys["upper"]}
        command = [*SLORA, "complete", "good morning", "--temperature", "0", *options]
        return subprocess.run(
            command, env=environment(**variables), capture_output=True, text=True, check=True
        )

    raw = complete("--raw")
    assert raw.stdout == "\n"
    assert "the answer is empty; a model trained on chat messages may need a chat template" in raw.stderr
    chat = complete()
    assert (chat.stdout, chat.stderr) == (TASKS["upper"].apply("good morning") + "\n", "")


def test_unseen_sentences_are_answered_right_and_as_peft_answers_them(
    demo: Served, keys: dict[str, str], soak: bool, report: Callable[[str], None]
) -> None:
    sentences = unseen_sentences(500 if soak else NUM_SENTENCES)
    asked = [(tenant, sentence) for sentence in sentences for tenant in keys]
    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda pair: ask(demo, keys[pair[0]], pair[1]), asked))
    right = dict.fromkeys(keys, 0)
    for (tenant, sentence), answer in zip(asked, answers, strict=True):
        right[tenant] += answer == TASKS[task_of(tenant)].apply(sentence)
    accuracy = {tenant: count / len(sentences) for tenant, count in right.items()}
    num_judged = len(asked) if soak else NUM_JUDGED * len(keys)
    verdict = judge(list(zip(asked, answers, strict=True))[:num_judged])
    listed = ", ".join(f"{tenant} {share:.1%}" for tenant, share in accuracy.items())
    report(f"demo over HTTP, {len(sentences)} unseen sentences each: {listed}")
    report(f"demo against peft: {verdict.positions} tokens, {verdict.excused} excused, {verdict.wrong} wrong")
    assert min(accuracy.values()) >= LOWEST_ACCURACY
    assert verdict.equal


def judge(answered: list[tuple[tuple[str, str], str]]) -> Verdict:
    """Compares every answer, including its end token, with transformers + peft."""
    tokenizer = Tokenizer.from_directory(DEMO / "model")
    eos = read_model_spec(DEMO / "model").eos_token_ids[0]
    # The prefix is needed because peft adds modules with these names, and every module already has a method `double`.
    oracle = Oracle(DEMO / "model", {f"task_{name}": DEMO / "adapters" / name for name in ADAPTERS})
    verdict = Verdict()
    for (tenant, sentence), answer in answered:
        text = tokenizer.apply_chat_template([{"role": "user", "content": sentence}])
        prompt = tokenizer.encode(text, add_special_tokens=False)
        tokens = [*tokenizer.encode(answer, add_special_tokens=False), eos][:MAX_TOKENS]
        verdict += oracle.judge(prompt, tokens, f"task_{tenant}" if tenant in ADAPTERS else None)
    return verdict
