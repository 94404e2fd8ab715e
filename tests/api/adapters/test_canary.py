"""A new adapter runs as a canary before any request can call it. An adapter that fails leaves nothing behind."""

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from slora.core.errors import (
    AdapterFetchFailed,
    DeadlineMissed,
    EngineUnavailable,
    RequestFailed,
    RequestRefused,
    StepFailed,
)
from slora.core.request import EngineRequest, FinishReason, TokenDelta, TokenLogprobs
from slora.models.model_spec import read_model_spec
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import AdapterInvalid
from slora_adapters.version import AdapterVersion
from slora_api.adapters.publisher import CANARY_TENANT, MAX_WRITERS, Canary, choose_prompt
from slora_api.completions.services import AnswerServices
from slora_api.core.errors import InspectionFailed
from tests.adapters.hand_made import make_config, make_members, make_tensors
from tests.api.adapters.hostile_uploads import as_parts
from tests.api.conftest import Kit
from tests.api.platform import Platform, running_platform
from tests.api.scripted_engine import EOS, ScriptedEngine, byte_tokenizer, deltas_of, trial_of
from tests.api.served import CHARACTERS, Served, wait_for, write_adapter

OTHER = make_members(tensors=make_tensors(seed=4))
Trial = Sequence[TokenDelta | Exception]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"ok")])) as running:
        yield running


def names(platform: Platform, key: str) -> list[str]:
    client = platform.api(key)
    return [adapter["name"] for adapter in client.get("/v1/adapters").json()["data"]]


def blobs(platform: Platform) -> list[Path]:
    return [path for path in (platform.directory / "adapters" / "blobs").rglob("*") if path.is_file()]


def upload_with(platform: Platform, of_adapter: Trial, of_base: Trial | None = None) -> httpx.Response:
    """The response to an upload whose canary runs as given."""
    platform.engine.canary = lambda request: (
        of_adapter if request.adapters else trial_of(request) if of_base is None else of_base
    )
    return platform.upload(platform.key("tries"), "new")


SAME = [TokenDelta((65,), FinishReason.LENGTH, (TokenLogprobs(-1.0, ((65, -1.0),)),))]
NAN = [TokenDelta((65,), FinishReason.LENGTH, (TokenLogprobs(math.nan, ((65, math.nan),)),))]
REFUSED: dict[str, tuple[Trial, int, str, str]] = {
    "no effect": (SAME, 422, "no_effect", "for a prompt of 10 tokens, all 2 log-probabilities equal"),
    "not a number": (NAN, 422, "not_finite", "log-probabilities that are NaN"),
    "broken arithmetic": (
        [RequestFailed("logits of x")],
        422,
        "not_finite",
        "makes the model's outputs NaN or infinite: logits",
    ),
    "too large": (
        [RequestRefused("200 pages of 100", "prompt")],
        422,
        "not_servable",
        "be served here: 200 pages",
    ),
    "an engine that dies": ([EngineUnavailable("it died")], 503, "engine_unavailable", "it died"),
    "a store that is gone": ([AdapterFetchFailed("no", "unavailable")], 503, "store_unavailable", "no"),
    "another request's fault": ([StepFailed("not its fault")], 503, "step_failed", "not its fault"),
    "a deadline": ([DeadlineMissed("late")], 503, "deadline_missed", "late"),
}


def test_an_adapter_that_fails_its_canary_is_refused_and_deleted(platform: Platform) -> None:
    for trial, status, code, words in REFUSED.values():
        platform.engine.forgotten.clear()
        answer = upload_with(platform, trial)
        error = answer.json()["error"]
        codes = {error["code"], *(reason["code"] for reason in error.get("reasons", ()))}
        assert (answer.status_code, code in codes) == (status, True), error
        assert words in error["message"]
        assert names(platform, platform.key("tries")) == [] and blobs(platform) == []
        assert [version.tenant for version in platform.engine.forgotten] == [platform.tenant_id("tries")]
    of_base = upload_with(platform, SAME, [RequestFailed("the base breaks")])
    assert (of_base.status_code, of_base.json()["error"]["code"]) == (500, "generation_failed")
    platform.engine.ready = False
    away = platform.upload(platform.key("tries"), "new")
    assert (away.status_code, away.json()["error"]["code"]) == (503, "engine_unavailable")
    assert away.headers["Retry-After"] and blobs(platform) == []


def test_an_upload_is_not_listed_or_charged_during_its_canary(platform: Platform) -> None:
    seen: list[EngineRequest] = []

    key = platform.key("tries")
    record = platform.services.keys.store.authenticate(key)
    assert record is not None

    def look(request: EngineRequest) -> Trial:
        assert platform.find(AnswerServices).catalog.list_adapters(record)["data"] == []
        seen.append(request)
        return trial_of(request)

    platform.engine.canary = look
    answer = platform.upload(key, "new")
    assert answer.status_code == 201 and answer.json()["certificate"]["logprob_change"] == 1.0
    assert {request.tenant for request in seen} == {CANARY_TENANT} and platform.engine.requests == []
    digest = answer.json()["digest"]
    assert [request.versions for request in seen] == [
        (),
        (AdapterVersion(platform.tenant_id("tries"), digest),),
    ]
    assert seen[0].prompt_token_ids == seen[1].prompt_token_ids and len(seen[0].prompt_token_ids) < 16


def test_a_version_that_fails_its_canary_does_not_change_its_name(platform: Platform) -> None:
    key = platform.key("tries")
    first = platform.upload(key, "x").json()
    kept = blobs(platform)
    platform.engine.canary = lambda request: SAME
    assert platform.upload(key, "x", OTHER).status_code == 422
    client = platform.api(key)
    assert client.get("/v1/adapters/x").json()["digest"] == first["digest"]
    assert len(client.get("/v1/adapters/x/versions").json()["data"]) == 1
    assert blobs(platform) == kept


def test_pushing_the_newest_version_again_skips_the_canary(platform: Platform) -> None:
    key = platform.key("tries")
    assert platform.upload(key, "x").json()["certificate"]["logprob_change"] == 1.0
    platform.engine.canary = lambda request: SAME
    again = platform.upload(key, "x")
    assert again.status_code == 201 and not again.json()["new_version"]
    assert again.json()["certificate"]["logprob_change"] is None
    assert len(platform.engine.forgotten) == 1
    # With its own chat template, it is another version.
    assert platform.upload(key, "x", make_members(chat_template_dot_jinja="{{ x }}")).status_code == 422


def test_a_repeated_canary_does_not_remove_an_adapter_that_is_served(platform: Platform) -> None:
    key = platform.key("tries")
    platform.upload(key, "x")
    # Only the canary's copy is removed. It was loaded regardless of what the tenant may hold in the pool.
    assert len(platform.engine.forgotten) == 1
    assert platform.upload(key, "y").status_code == 201
    platform.engine.canary = lambda request: [EngineUnavailable("it died")]
    assert platform.upload(key, "z").status_code == 503
    assert len(platform.engine.forgotten) == 1 and len(blobs(platform)) == 2


def test_the_same_weights_of_another_tenant_survive_a_failed_canary(platform: Platform) -> None:
    assert platform.upload(platform.key("first"), "x").status_code == 201
    assert upload_with(platform, SAME).status_code == 422
    assert len(blobs(platform)) == 2


@dataclass
class SlowCanaries(ScriptedEngine):
    """The canaries of all tenants but `fast` wait for `go_on`. fast: the id of a tenant. num_waiting: how many wait."""

    fast: str = ""
    go_on: threading.Event = field(default_factory=threading.Event)
    num_waiting: int = 0

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        if any(version.tenant != self.fast for version in request.versions):
            self.num_waiting += 1
            while not self.go_on.is_set():
                await asyncio.sleep(0.01)
        async for arrived in super().generate(request):
            yield arrived


def test_uploads_that_wait_for_their_canaries_do_not_hold_up_another(tmp_path: Path) -> None:
    engine, num_slow = SlowCanaries([deltas_of(b"ok")]), MAX_WRITERS + 1
    with (
        running_platform(tmp_path, engine, max_concurrent_uploads=2 * num_slow) as platform,
        ThreadPoolExecutor(num_slow) as threads,
    ):
        fast = platform.key("fast")
        engine.fast = platform.tenant_id("fast")
        keys = [platform.key(f"slow-{number}") for number in range(num_slow)]
        slow = [threads.submit(platform.upload, key, "x") for key in keys]
        try:
            wait_for(lambda: engine.num_waiting == num_slow or None)
            assert platform.upload(fast, "x").status_code == 201
        finally:
            engine.go_on.set()
        assert [upload.result().status_code for upload in slow] == [201] * num_slow


def test_a_canary_that_does_not_end_times_out(tmp_path: Path) -> None:
    engine = ScriptedEngine([deltas_of(b"ok")], hang=True)
    engine.canary = lambda request: [TokenDelta(())]
    canary = Canary(engine, byte_tokenizer(), timeout_s=0.05)
    with pytest.raises(InspectionFailed, match=r"within 0.05 s"):
        asyncio.run(canary.try_out(AdapterVersion("t", "0" * 64), ()))


def test_the_canary_prompt_includes_tokens_with_changed_embeddings() -> None:
    seen: list[EngineRequest] = []

    def look(request: EngineRequest) -> Trial:
        seen.append(request)
        return SAME

    canary = Canary(ScriptedEngine(canary=look), byte_tokenizer())
    with pytest.raises(AdapterInvalid, match="for a prompt of 12 tokens"):
        asyncio.run(canary.try_out(AdapterVersion("t", "0" * 64), (200, 201)))
    assert [request.prompt_token_ids[-2:] for request in seen] == [[200, 201]] * 2


def test_the_canary_works_for_a_vocabulary_without_ascii() -> None:
    """Born from such a model: the canary's prompt was text, which had no tokens, so each upload was a 400."""
    prompts: list[list[int]] = []

    def look(request: EngineRequest) -> Trial:
        prompts.append(request.prompt_token_ids)
        return trial_of(request)

    words = {chr(0x4E00 + number): number for number in range(40)}
    fast = FastTokenizer(models.WordLevel(words))
    fast.add_special_tokens(["<s>", "</s>"])
    canary = Canary(ScriptedEngine(canary=look), Tokenizer(fast, {}, None))
    assert asyncio.run(canary.try_out(AdapterVersion("t", "0" * 64), ())) > 0
    assert len(prompts) == 2 and prompts[0] == prompts[1]
    assert len(prompts[0]) == 10 and set(prompts[0]) <= set(range(40))


@pytest.mark.parametrize("vocab_size", [1, 5, 257, 300])
def test_the_canary_prompt_is_deterministic_and_has_no_special_tokens(vocab_size: int) -> None:
    prompt = choose_prompt(byte_tokenizer(), vocab_size)
    assert 1 <= len(prompt) <= 10 and len(set(prompt)) == len(prompt)
    assert set(prompt) <= set(range(min(vocab_size, EOS)))
    assert choose_prompt(byte_tokenizer(), vocab_size) == prompt


def test_a_vocabulary_of_only_added_tokens_still_gives_a_canary_prompt() -> None:
    fast = FastTokenizer(models.WordLevel({}))
    fast.add_special_tokens(["<s>", "</s>"])
    assert choose_prompt(Tokenizer(fast, {}, None), 2) == [0]


def test_an_adapter_of_the_embeddings_of_a_few_rare_tokens_has_an_effect(server: Served, kit: Kit) -> None:
    shape = read_model_spec(kit.base).shape("float32")
    values = np.random.default_rng(5)
    a = np.zeros((2, shape.vocab_size), np.float32)
    # No text that a canary would use contains these characters.
    a[:, [CHARACTERS.index("~"), CHARACTERS.index("|")]] = values.standard_normal((2, 2))
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    tensors = {name + "A": a, name + "B": values.standard_normal((shape.hidden_size, 2), np.float32)}
    members = make_members(make_config(target_modules=["embed_tokens"]), tensors)
    files = {field: (file_name, raw) for field, file_name, raw in as_parts(members)}
    with server.client(server.make_key("rare")) as client:
        answer = client.post("/v1/adapters", data={"name": "rare"}, files=files)
    assert answer.status_code == 201, answer.text
    assert answer.json()["certificate"]["logprob_change"] > 0


def test_the_canary_of_a_real_engine_measures_how_much_an_adapter_changes_it(
    server: Served, kit: Kit, tmp_path: Path
) -> None:
    weak = write_adapter(tmp_path / "weak", seed=9, r=4)
    tensors = load_file(weak / "adapter_model.safetensors")
    faint = {name: tensor * 1e-2 for name, tensor in tensors.items()}
    changes = []
    key = server.make_key("degrees")
    for number, weights in enumerate((tensors, faint)):
        members = {"adapter_config.json": (weak / "adapter_config.json").read_bytes()}
        members["adapter_model.safetensors"] = save(weights)
        files = {field: (file_name, raw) for field, file_name, raw in as_parts(members)}
        with server.client(key) as client:
            answer = client.post("/v1/adapters", data={"name": f"n{number}"}, files=files)
        assert answer.status_code == 201, answer.text
        changes.append(answer.json()["certificate"]["logprob_change"])
    assert 0 < 10 * changes[1] < changes[0]
