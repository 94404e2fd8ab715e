import gc
import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration

from slora import LLM, Pooling, PoolingKind, SamplingParams
from slora.core.errors import ConfigError, RequestRefused
from slora.core.request import FinishReason
from slora.core.sampling_params import StructuredOutput, choice_seed
from slora.llm import request_builder
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import AdapterInvalid, AdapterNotFound
from tests.support.cpu_kernels import KERNELS
from tests.support.json_files import read_json, write_json
from tests.support.model_kit import ModelKit, make_kit
from tests.support.peft_adapters import KINDS
from tests.support.tiny_tokenizers import byte_level, write_tokenizer

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> ModelKit:
    kinds = {kind: KINDS[kind] for kind in ("odd_rank", "rslora")}
    kit = make_kit(tmp_path_factory.mktemp("llm"), "llama", kinds, vocab_size=400, num_hidden_layers=2)
    write_tokenizer(kit.directory, byte_level(vocab_size=400))
    return kit


@pytest.fixture(scope="module")
def llm(kit: ModelKit) -> LLM:
    return LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(300))


def test_a_single_prompt_needs_no_list(llm: LLM) -> None:
    (text,) = llm.generate("The quick", GREEDY)
    (tokens,) = llm.generate(text.prompt_token_ids, GREEDY)
    assert tokens == text
    assert len(text.token_ids) == 12 and text.finish_reason is FinishReason.LENGTH


def test_texts_and_token_lists_may_be_mixed_and_keep_their_order(llm: LLM) -> None:
    prompts = ["The quick", [5, 6, 7], "fox", (8, 9)]
    together = llm.generate(prompts, GREEDY)
    assert together == [llm.generate([prompt], GREEDY)[0] for prompt in prompts]


def test_each_prompt_may_have_its_own_parameters_and_adapter(llm: LLM, kit: ModelKit) -> None:
    adapters = [None, kit.adapters["odd_rank"], str(kit.adapters["rslora"])]
    params = [SamplingParams(max_tokens=n, temperature=0.0) for n in (3, 5, 7)]
    outputs = llm.generate(["fox"] * 3, params, adapters)
    assert [len(output.token_ids) for output in outputs] == [3, 5, 7]
    assert len({tuple(output.token_ids[:3]) for output in outputs}) == 3
    assert outputs[1:2] == llm.generate("fox", params[1], kit.adapters["odd_rank"])


def test_the_text_is_that_of_the_tokens_without_the_one_that_stopped_it(llm: LLM, kit: ModelKit) -> None:
    tokenizer = Tokenizer.from_directory(kit.directory)
    (free,) = llm.generate("fox", GREEDY)
    assert free.text == tokenizer.decode(free.token_ids)
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    (stopped,) = llm.generate("fox", SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(stop,)))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.text == tokenizer.decode(free.token_ids[:first])
    assert stopped.finish_reason is FinishReason.STOP


def test_a_stop_string_ends_the_text_and_the_generation(llm: LLM) -> None:
    (free,) = llm.generate("fox", SamplingParams(max_tokens=200, temperature=0.0))
    stop = free.text[5:8]
    at = free.text.find(stop)
    before = llm.stats().generated_tokens
    (stopped,) = llm.generate("fox", SamplingParams(max_tokens=200, temperature=0.0, stop=(stop,)))
    assert stopped.text == free.text[:at]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.token_ids) == llm.stats().generated_tokens - before < 200
    llm.check()


def test_a_stream_gives_every_prompt_its_answer_piece_by_piece(llm: LLM, kit: ModelKit) -> None:
    prompts, adapters = ["The quick", [5, 6, 7], "fox"], [None, kit.adapters["odd_rank"], None]
    params = [SamplingParams(max_tokens=n, temperature=0.0, logprobs=1) for n in (9, 4, 7)]
    whole = llm.generate(prompts, params, adapters)
    deltas = list(llm.stream(prompts, params, adapters))
    assert {delta.index for delta in deltas[:3]} == {0, 1, 2}, "the answers do not come side by side"
    for index, answer in enumerate(whole):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == answer.text
        assert [token for delta in own for token in delta.token_ids] == answer.token_ids
        assert [entry for delta in own for entry in delta.logprobs or ()] == answer.logprobs
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + [answer.finish_reason]


def test_each_choice_equals_the_answer_to_a_separate_request(llm: LLM, kit: ModelKit) -> None:
    params = SamplingParams(max_tokens=12, seed=7, logprobs=1)
    adapter = kit.adapters["odd_rank"]
    before = llm.stats().prompt_tokens
    (answer,) = llm.generate([[5, 6, 7]], replace(params, n=3), adapter)
    assert llm.stats().prompt_tokens - before == 3
    apart = [llm.generate([[5, 6, 7]], replace(params, seed=choice_seed(7, n)), adapter)[0] for n in range(3)]
    assert [choice.token_ids for choice in answer.choices] == [one.token_ids for one in apart]
    assert [choice.text for choice in answer.choices] == [one.text for one in apart]
    assert answer.text == answer.choices[0].text and answer.logprobs == answer.choices[0].logprobs
    llm.check()


def test_a_stop_string_ends_its_own_choice_only(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, seed=3, n=4, ignore_eos=True)
    (free,) = llm.generate("fox", params)
    pairs = (choice.text[5:7] for choice in free.choices)
    stop = next(pair for pair in pairs if not all(pair in choice.text for choice in free.choices))
    (stopped,) = llm.generate("fox", replace(params, stop=(stop,)))
    cut = [choice.text.split(stop)[0] for choice in free.choices]
    assert [choice.text for choice in stopped.choices] == cut
    reasons = [choice.finish_reason for choice in stopped.choices]
    assert reasons == [FinishReason.STOP if stop in one.text else FinishReason.LENGTH for one in free.choices]
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH}
    assert llm.stats().pages_held == 0


def test_choices_stream_side_by_side(llm: LLM) -> None:
    prompts, params = ["fox", "dog"], SamplingParams(max_tokens=9, seed=1, n=2)
    whole = llm.generate(prompts, params)
    deltas = list(llm.stream(prompts, params))
    for index, answer in enumerate(whole):
        for number, choice in enumerate(answer.choices):
            own = [delta for delta in deltas if (delta.index, delta.choice) == (index, number)]
            assert "".join(delta.text for delta in own) == choice.text
            assert own[-1].finish_reason is choice.finish_reason


def test_best_of_returns_the_likeliest_of_all_samples(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=4, n=5)
    (every,) = llm.generate("fox", replace(params, logprobs=0))
    ranked = sorted(every.choices, key=lambda choice: -sum(entry.logprob for entry in choice.logprobs or ()))
    (best,) = llm.generate("fox", replace(params, n=2, best_of=5))
    assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in ranked[:2]]
    assert best.logprobs is None
    with pytest.raises(RequestRefused, match="best_of is 5 and n is 2") as caught:
        llm.stream("fox", replace(params, n=2, best_of=5))
    assert caught.value.param == "best_of"


def test_prompts_are_embedded_in_order_each_with_its_adapter(llm: LLM, kit: ModelKit) -> None:
    prompts, adapters = (
        ["The quick", [5, 6, 7], "fox"],
        [None, kit.adapters["odd_rank"], kit.adapters["rslora"]],
    )
    mean = Pooling(PoolingKind.MEAN)
    given = [llm.generate([prompt], GREEDY)[0].prompt_token_ids for prompt in prompts]
    for pooling in (None, mean):
        found = llm.embed(prompts, pooling, adapters)
        for tokens, kind, vector in zip(given, (None, "odd_rank", "rslora"), found, strict=True):
            expected = kit.oracle.embedding(tokens, kind, mean=pooling is mean)
            assert vector.dtype == np.float32
            assert vector.tolist() == pytest.approx(expected.tolist(), abs=2e-5)
    (alone,) = llm.embed("fox", mean, adapters[2])
    assert alone.tolist() == pytest.approx(found[2].tolist(), abs=1e-6)
    llm.check()


def test_a_prompt_that_cannot_be_embedded_refuses_the_call_and_frees_everything(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match="token id 400"):
        llm.embed(["a", [400]])
    assert llm.stats().running == llm.stats().waiting == 0
    assert llm.embed([]) == []


def test_calls_between_the_pieces_of_a_stream_change_nothing(llm: LLM) -> None:
    (alone,) = llm.generate("The quick", GREEDY)
    (other,) = llm.generate("fox", GREEDY)
    first, second = llm.stream("The quick", GREEDY), llm.stream("fox", GREEDY)
    pieces = [next(first), next(second), next(first)]
    assert llm.generate("fox", GREEDY) == [other]
    llm.embed("fox")
    ours = [pieces[0], pieces[2], *first]
    assert [token for delta in ours for token in delta.token_ids] == alone.token_ids
    assert [token for delta in [pieces[1], *second] for token in delta.token_ids] == other.token_ids


def test_closing_a_stream_ends_its_requests(llm: LLM) -> None:
    stream = llm.stream(["fox", "dog"], SamplingParams(max_tokens=200, temperature=0.0))
    next(stream)
    assert llm.stats().running == 2
    stream.close()
    stats = llm.stats()
    assert stats.running == stats.waiting == stats.pages_held == 0
    llm.check()


def test_a_chat_equals_the_completion_of_the_rendered_template(llm: LLM, kit: ModelKit) -> None:
    tokenizer = Tokenizer.from_directory(kit.directory)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "fox?"}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.prompt_token_ids == prompt
    assert [answer] == llm.generate(prompt, GREEDY)
    assert llm.chat([messages, messages[1:]], GREEDY)[0] == answer
    assert "".join(delta.text for delta in llm.stream_chat(messages, GREEDY)) == answer.text


def test_an_adapters_own_template_and_defaults_are_used(llm: LLM, kit: ModelKit, tmp_path: Path) -> None:
    shutil.copytree(kit.adapters["rslora"], tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text("say {{ messages[0].content }}", encoding="utf-8")
    (tmp_path / "own" / "generation_config.json").write_text(
        '{"max_new_tokens": 5, "do_sample": false}', encoding="utf-8"
    )
    (answer,) = llm.chat([{"role": "user", "content": "fox"}], adapters=tmp_path / "own")
    assert answer.prompt_token_ids == Tokenizer.from_directory(kit.directory).encode("say fox")
    assert len(answer.token_ids) == 5
    assert [answer] == llm.generate("say fox", SamplingParams(max_tokens=5, temperature=0), tmp_path / "own")


def test_an_adapters_added_tokens_are_those_of_its_prompts_and_answers(
    llm: LLM, kit: ModelKit, tmp_path: Path
) -> None:
    """One of them is a piece of the base's words that the adapter hides, which grammars spell as the base does."""
    own = tmp_path / "own"
    shutil.copytree(kit.adapters["rslora"], own)
    theirs, base = (AutoTokenizer.from_pretrained(kit.directory) for _ in range(2))
    hidden = "oji"  # A token in the middle of words of the text that trained the tokenizer.
    theirs.add_tokens(["<think>"])
    theirs.add_special_tokens({"additional_special_tokens": [hidden]})
    theirs.save_pretrained(own)
    text, think = f"a <think>fox{hidden}", theirs.convert_tokens_to_ids("<think>")
    thinking = replace(GREEDY, logit_bias={think: 100.0}, max_tokens=2)
    answers = llm.generate([text, text], thinking, [own, None])
    assert [answer.text for answer in answers] == ["<think><think>", ""]
    assert [answer.prompt_token_ids for answer in answers] == [
        theirs(text)["input_ids"],
        base(text)["input_ids"],
    ]
    assert llm.embed([text, text], adapters=[own, None])[0].shape == (llm.info.shape.hidden_size,)
    with pytest.raises(RequestRefused, match="makes 'oji' a special token, which the base"):
        llm.generate(text, replace(GREEDY, structured_output=StructuredOutput.choice([hidden])), own)
    with pytest.raises(RequestRefused, match="different added tokens"):
        llm.generate("fox", GREEDY, [[own, kit.adapters["rslora"]]])


def test_adapters_with_equal_added_tokens_share_a_tokenizer_until_they_are_discarded(
    llm: LLM, kit: ModelKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(kit.directory)
    tokenizer.add_tokens(["<think>"])
    for name in ("odd_rank", "rslora"):
        shutil.copytree(kit.adapters[name], tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    built: list[weakref.ref[Tokenizer]] = []
    build = Tokenizer.with_added_tokens

    def build_noted(base: Tokenizer, tokens: Any) -> Tokenizer:
        extended = build(base, tokens)
        built.append(weakref.ref(extended))
        return extended

    monkeypatch.setattr(Tokenizer, "with_added_tokens", build_noted)
    adapters = [tmp_path / "odd_rank", tmp_path / "rslora"]
    for _ in range(2):
        llm.generate(["<think>"] * 2, GREEDY, adapters)
    assert len(built) == 1 and built[0]() is not None
    for adapter in adapters:
        llm.remove_adapter(adapter)
    gc.collect()
    assert built[0]() is None


def test_default_max_tokens_are_cut_to_the_room_in_the_pool(kit: ModelKit, tmp_path: Path) -> None:
    shutil.copytree(kit.adapters["rslora"], tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").write_text(
        '{"max_new_tokens": 300, "do_sample": false}', encoding="utf-8"
    )
    small = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(18))
    (answer,) = small.generate([1, 2, 3], adapters=tmp_path / "own")
    assert answer.finish_reason is FinishReason.LENGTH
    # The KV of the last token is never written.
    room_pages = small.info.num_pages - small.stats().adapter_pages
    assert len(answer.token_ids) == room_pages * small.info.block_tokens - 3 + 1 < 300


def test_an_adapter_with_texts_that_an_upload_refuses_is_refused(
    llm: LLM, kit: ModelKit, tmp_path: Path
) -> None:
    shutil.copytree(kit.adapters["rslora"], tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    (tmp_path / "own" / "generation_config.json").write_text('{"num_beams": 4}', encoding="utf-8")
    with pytest.raises(AdapterInvalid) as caught:
        llm.generate("fox", GREEDY, tmp_path / "own")
    codes = {reason.code for reason in caught.value.reasons}
    assert codes == {"chat_template_malformed", "generation_config_unsupported"}


def set_alpha(directory: Path, alpha: int) -> None:
    path = directory / "adapter_config.json"
    write_json(path, {**read_json(path), "lora_alpha": alpha})


def test_an_adapter_is_read_again_when_only_its_config_changed(
    llm: LLM, kit: ModelKit, tmp_path: Path
) -> None:
    """Born from a bug: only the weights' modification time was checked, so a new alpha in the config had no effect."""
    shutil.copytree(kit.adapters["odd_rank"], tmp_path / "own")
    set_alpha(tmp_path / "own", 4)
    before = llm.generate("fox", GREEDY, tmp_path / "own")
    set_alpha(tmp_path / "own", 40)
    after = llm.generate("fox", GREEDY, tmp_path / "own")
    shutil.copytree(tmp_path / "own", tmp_path / "new")
    assert after == llm.generate("fox", GREEDY, tmp_path / "new") != before


@pytest.mark.parametrize("how", ["in place", "renamed"])
def test_an_adapter_is_read_again_when_its_weights_change_but_not_their_mtime(
    llm: LLM, kit: ModelKit, tmp_path: Path, how: str
) -> None:
    """Born from a bug: weights with the same size and modification time were assumed to be unchanged."""
    own = tmp_path / "own"
    shutil.copytree(kit.adapters["odd_rank"], own)
    weights = own / "adapter_model.safetensors"
    llm.generate("fox", GREEDY, own)
    written = weights.stat().st_mtime_ns
    raw = bytearray(weights.read_bytes())
    body = 8 + int.from_bytes(raw[:8], "little")
    raw[body:] = np.frombuffer(raw[body:], "<f4")[::-1].tobytes()
    target = weights if how == "in place" else own / "next"
    target.write_bytes(raw)
    os.utime(target, ns=(written, written))
    target.replace(weights)
    after = llm.generate("fox", GREEDY, own)
    shutil.copytree(own, tmp_path / "new")
    assert after == llm.generate("fox", GREEDY, tmp_path / "new")
    assert after != llm.generate("fox", GREEDY, kit.adapters["odd_rank"])


def test_prompts_of_one_call_that_name_the_same_adapter_get_the_same_version(
    llm: LLM, kit: ModelKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(kit.adapters["odd_rank"], tmp_path / "own")
    reads = []
    read = request_builder.read_content
    monkeypatch.setattr(
        request_builder, "read_content", lambda *about: reads.append(about[0]) or read(*about)
    )
    llm.generate(["fox"] * 5, GREEDY, [tmp_path / "own", None, tmp_path / "own", tmp_path / "own", None])
    assert reads == [tmp_path / "own"]


def test_the_tokens_of_the_prompt_are_scored_when_asked_for(llm: LLM) -> None:
    """Generates an answer, then sends it as a prompt. The tokens' log-probabilities are the same both times."""
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
    (answer,) = llm.generate("fox", params)
    longer = [*answer.prompt_token_ids, *answer.token_ids]
    (scored,) = llm.generate([longer], SamplingParams(max_tokens=2, prompt_logprobs=2))
    assert scored.prompt_logprobs is not None and scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(longer) and answer.prompt_logprobs is None
    found = scored.prompt_logprobs[len(answer.prompt_token_ids) :]
    assert answer.logprobs is not None
    for one, other in zip(found, answer.logprobs, strict=True):
        assert one is not None and one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize("name", ["params", "adapters"])
def test_lists_of_another_length_are_refused(llm: LLM, name: str) -> None:
    wrong = {"params": [GREEDY], "adapters": [None]}[name]
    with pytest.raises(
        ConfigError, match=f"{name} has 1 entries for 2 prompts; give one for all or one for each"
    ):
        llm.generate(["a", "b"], **{name: wrong})


def test_one_invalid_prompt_refuses_the_call_and_frees_everything(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match="token id 400"):
        llm.generate([[1], [400], [2]], GREEDY)
    stats = llm.stats()
    assert stats.running == stats.waiting == stats.pages_held == 0
    assert len(llm.generate([[1]], GREEDY)[0].token_ids) == 12


def test_a_prompt_with_a_lone_surrogate_is_refused_with_its_position(llm: LLM) -> None:
    """Born from a bug: the tokenizer raised a TypeError that named neither the prompt nor the character."""
    with pytest.raises(
        RequestRefused, match=r"prompt 1 has the lone surrogate '\\ud800' at character 3"
    ) as caught:
        llm.generate(["fox", "fox\ud800"], GREEDY)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestRefused, match=r"conversation 0 has the lone surrogate '\\udfff'") as caught:
        llm.chat([{"role": "user", "content": "fox\udfff"}], GREEDY)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("prompts", [[1.5], [[5, "2"]], [[5, None]], [[[5]]]])
def test_a_prompt_of_anything_but_integers_is_refused(llm: LLM, prompts: Any) -> None:
    """Born from a bug: int() converted 1.5 and "2" to token ids, and other values raised a raw TypeError."""
    with pytest.raises(RequestRefused, match="prompt 0") as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param == "prompt"


def test_token_ids_may_be_integers_of_numpy(llm: LLM) -> None:
    token_ids = list(np.arange(5, 8))
    assert (
        llm.generate(token_ids, GREEDY)
        == llm.generate([token_ids], GREEDY)
        == llm.generate([5, 6, 7], GREEDY)
    )


def test_a_directory_without_a_valid_adapter_is_refused_before_anything_runs(
    llm: LLM, tmp_path: Path
) -> None:
    before = llm.stats()
    with pytest.raises(AdapterNotFound):
        llm.generate("fox", GREEDY, tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(AdapterInvalid):
        llm.generate(["fox", "dog"], GREEDY, [None, tmp_path])
    assert llm.stats() == before


def test_without_a_tokenizer_tokens_go_in_and_come_out(kit: ModelKit, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(kit.directory / name)
    bare = LLM(tmp_path, kernels=KERNELS, pool_bytes=kit.pool_bytes(50))
    (output,) = bare.generate([[1, 2]], GREEDY)
    assert len(output.token_ids) == 12 and output.text == ""
    with pytest.raises(RequestRefused, match=r"no tokenizer\.json.*pass token ids"):
        bare.generate("text", GREEDY)
    with pytest.raises(RequestRefused, match="stop strings need a tokenizer"):
        bare.generate([[1]], SamplingParams(stop=("a",)))


def test_gemma_3_is_read_under_all_names_of_its_tensors(tmp_path: Path) -> None:
    """Born from a bug: a checkpoint that transformers 5 saves with save_original_format=False was refused."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    text = {**sizes, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={**text, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        **{"mm_tokens_per_image": 4, "image_token_id": 5, "boi_token_id": 6, "eoi_token_id": 7},
    )
    model = Gemma3ForConditionalGeneration(config)
    greedy, answers = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0), []
    for name, original in (("old", True), ("new", False)):
        model.save_pretrained(tmp_path / name, save_original_format=original)
        llm = LLM(tmp_path / name, dtype="float32", kernels=KERNELS, pool_bytes=1 << 22)
        answers.append(llm.generate([[3, 9, 11, 40]], greedy))
    assert answers[0] == answers[1]
    ids = torch.tensor([[3, 9, 11, 40]])
    expected = model.generate(
        input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert answers[0][0].token_ids == expected[0, 4:].tolist()
