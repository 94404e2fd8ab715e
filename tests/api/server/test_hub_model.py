"""`slora serve` with a base model of the Hugging Face hub, or in a GGUF file. The hub is a server on the loopback
interface."""

import subprocess
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from tests.api.conftest import Kit
from tests.api.served import ADMIN_KEY, SLORA, environment, serving
from tests.support.gguf_files import sentencepiece_vocabulary, write_gguf
from tests.support.hub import COMMIT, adapter_files, running_hub

REPO, TOKEN = "org/My-Model", "hf_the-operators-token"


def test_a_model_of_the_hub_is_served_by_its_name(kit: Kit, tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.revisions[REPO, "v1"] = COMMIT
        hub.files[REPO, COMMIT] = adapter_files(kit.base)
        variables = environment(
            SLORA_ADMIN_KEY=ADMIN_KEY, HF_HOME=str(tmp_path / "cache"), HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN
        )
        with serving(Path(f"{REPO}@v1"), tmp_path / "data", env=variables) as served:
            served.wait_until_ready()
            with served.client(served.make_key("acme")) as client:
                (base,) = client.get("/v1/models").raise_for_status().json()["data"]
                assert (base["id"], base["root"]) == (REPO, f"hf://{REPO}@{COMMIT}")
                assert client.get(f"/v1/models/{REPO}").raise_for_status().json()["root"] == base["root"]
                body = {
                    "model": REPO,
                    "messages": [{"role": "user", "content": "hello"}],
                    "max_tokens": 4,
                    "ignore_eos": True,
                }
                answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
                assert answer["model"] == REPO and answer["usage"]["completion_tokens"] == 4
        assert any("downloading" in line and f"of hf://{REPO}@{COMMIT}" in line for line in served.lines)
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert not any(TOKEN in line for line in served.lines)


@pytest.mark.soak
def test_a_gguf_file_is_served_by_its_name(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary()
    template = {"tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    model = tmp_path / "tiny-Q8_0.gguf"
    size = len(vocabulary["tokenizer.ggml.tokens"])
    write_gguf(
        model,
        "llama",
        lambda _: Type.Q8_0,
        template,
        vocabulary,
        vocab_size=size,
        hidden_size=64,
        head_dim=16,
        intermediate_size=96,
    )
    variables = environment(SLORA_ADMIN_KEY=ADMIN_KEY, XDG_CACHE_HOME=str(tmp_path / "cache"))
    with serving(model, tmp_path / "data", env=variables) as served:
        served.wait_until_ready()
        with served.client(served.make_key("acme")) as client:
            (base,) = client.get("/v1/models").raise_for_status().json()["data"]
            assert base["id"] == "tiny-Q8_0"
            body = {
                "model": "tiny-Q8_0",
                "messages": [{"role": "user", "content": "the fox"}],
                "max_tokens": 4,
                "ignore_eos": True,
            }
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == 4
    doctor = [*SLORA, "doctor", "--model", str(model), "--data-dir", str(tmp_path / "other")]
    examined = subprocess.run(doctor, env=variables, capture_output=True, encoding="utf-8")
    assert "tiny-Q8_0: llama, computed by slora's decoder in bfloat16" in examined.stdout, examined
