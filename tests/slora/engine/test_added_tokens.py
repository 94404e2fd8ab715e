"""Adapters that were trained after resize_token_embeddings, with rows for the added tokens, answer as peft does."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from slora import LLM, SamplingParams
from slora.core.errors import RequestRefused
from slora.core.request import EngineRequest, single_adapter
from slora_adapters.errors import AdapterInvalid
from tests.slora.engine.test_adapter_features import FEATURES
from tests.slora.engine.test_parity import GREEDY, Answer, Work, answer
from tests.slora.engine.test_tensor_parallel import divided_engine, make_requests
from tests.support.covering import soaked
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST
from tests.support.driving import drive, make_engine, make_source
from tests.support.model_kit import ModelKit, make_kit
from tests.support.oracle import Oracle, Verdict
from tests.support.peft_adapters import make_adapter, quiet_peft
from tests.support.tiny_models import VOCAB_SIZE, few_layers

# Trained whole matrices, copies that peft saves after a resize, and trained rows beside copies.
NUM_ADDED = {"added": 1, "copied": 3, "trained": 40}


@dataclass(frozen=True)
class ResizedKit(ModelKit):
    """Some adapters were trained on the base with rows for added tokens, and the others on the base."""

    oracles: dict[str | None, Oracle] = field(default_factory=dict)

    def judge(self, work: Work, answers: list[Answer]) -> Verdict:
        verdict = Verdict()
        for prompt, given, kind in zip(work.prompts, answers, work.kinds, strict=True):
            verdict += self.oracles[kind].judge(prompt, given.token_ids, kind, given.logprobs)
        return verdict


def make_resized_kit(root: Path, model: str, changes: dict[str, int]) -> ResizedKit:
    kinds = {kind: FEATURES["rows"](model)[kind] for kind in ("plain", "tokens")}
    plain = make_kit(root / "base", model, kinds, **changes)
    oracles = dict.fromkeys([None, *plain.adapters], plain.oracle)
    made = ResizedKit(plain.directory, dict(plain.adapters), oracles=oracles)
    embedding = "wte" if model == "gpt2" else "embed_tokens"
    for seed, kind in enumerate(NUM_ADDED):
        base = AutoModelForCausalLM.from_pretrained(plain.directory, dtype=torch.float32)
        base.resize_token_embeddings(VOCAB_SIZE + NUM_ADDED[kind], mean_resizing=False)
        for matrix in {base.get_input_embeddings().weight, base.get_output_embeddings().weight}:
            matrix.data[VOCAB_SIZE:] = 1.5 * matrix.data[: NUM_ADDED[kind]].roll(1, dims=1)
        is_tied, ids = base.config.tie_word_embeddings, [5, VOCAB_SIZE, VOCAB_SIZE + 2]
        fields: dict[str, object] = {"r": 3 + seed} | ({"fan_in_fan_out": True} if model == "gpt2" else {})
        if kind == "added":
            ties_both = model == "qwen2_tied"
            names = [embedding] if ties_both else [embedding, "lm_head"]
            fields |= {"modules_to_save": names, "ensure_weight_tying": ties_both}
        elif kind == "trained":
            fields["trainable_token_indices"] = {embedding: ids} | ({} if is_tied else {"lm_head": ids[1:]})
        base.save_pretrained(root / f"resized {kind}")
        trained = make_adapter(root / kind, base, seed=seed, std=0.15, **fields)
        if kind != "added":
            with quiet_peft():
                trained.save_pretrained(root / kind, save_embedding_layers=True)
        made.oracles[kind] = Oracle(root / f"resized {kind}", {kind: root / kind})
        made.adapters[kind] = root / kind
    return made


@pytest.fixture(scope="module")
def resized_kits(tmp_path_factory: pytest.TempPathFactory, soak: bool) -> Callable[[str], ResizedKit]:
    return cache(
        lambda model: make_resized_kit(tmp_path_factory.mktemp(model), model, few_layers(model, soak=soak))
    )


def _mix_resized(kit: ResizedKit, prompts_each: int, *, longest: int = 40) -> Work:
    """Prompts of all ids that each adapter has."""
    rng, kinds = random.Random(3), [None, *kit.adapters] * prompts_each
    sizes = [VOCAB_SIZE + NUM_ADDED.get(kind or "", 0) for kind in kinds]
    prompts = [
        [rng.choice((rng.randrange(size), size - 1)) for _ in range(rng.randrange(1, longest))]
        for size in sizes
    ]
    return Work(prompts, kinds)


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
@pytest.mark.parametrize("model", soaked(["llama", "qwen2_tied", "gemma2", "gpt2"], "llama", "gpt2"))
def test_rows_behind_those_of_the_base_answer_as_in_a_resized_base(
    resized_kits: Callable[[str], ResizedKit],
    report: Callable[[str], None],
    model: str,
    kernels: str,
    *,
    soak: bool,
) -> None:
    kit = resized_kits(model)
    work = _mix_resized(kit, 20 if soak else 2)
    llm = LLM(kit.directory, kernels=kernels, pool_bytes=kit.pool_bytes(900))
    answers = answer(llm, kit, work)
    verdict = kit.judge(work, answers)
    report(f"parity of {model} with added tokens, {kernels} kernels: {verdict}")
    assert verdict.equal, verdict
    generated = {token for given in answers for token in given.token_ids}
    assert max(generated) >= VOCAB_SIZE


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_added_tokens_survive_chunks_preemption_and_division(
    resized_kits: Callable[[str], ResizedKit], size: int, *, soak: bool
) -> None:
    kit = resized_kits("qwen2_tied")
    work = _mix_resized(kit, 2)
    # The adapter with whole matrices alone would take most of the pool.
    small = [place for place, kind in enumerate(work.kinds) if kind != "added"]
    few = Work([work.prompts[place] for place in small], [work.kinds[place] for place in small])
    settings = {"max_num_seqs": 9, "max_num_batched_tokens": 30, "max_model_len": 128}
    # With fewer layers, the rows of embedding and head take more pages.
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(30 if soak else 36), **settings)
    verdict = kit.judge(few, answer(llm, kit, few))
    stats = llm.stats()
    assert stats.preemptions > 0 and stats.adapter_evictions > 0
    assert verdict.equal, verdict
    with divided_engine(kit, size) as (engine, _, versions):
        answers = drive(engine, [make_requests(versions, work.prompts, work.kinds)])
    in_order = [answers[str(number)] for number in range(len(work.prompts))]
    divided = kit.judge(work, [Answer(one.token_ids, one.logprobs) for one in in_order])
    assert divided.equal, divided


def test_rows_without_added_tokens_are_sampled_as_in_other_batches(
    resized_kits: Callable[[str], ResizedKit], *, soak: bool
) -> None:
    """Penalties, biases, filters, log-probabilities and beams of all rows, alone and beside rows with more columns."""
    kit = resized_kits("llama")
    source, versions = make_source(kit)
    last = VOCAB_SIZE + NUM_ADDED["trained"] - 1
    kinds = [None, "plain", "added", "trained"]
    forms = [
        SamplingParams(seed=1, temperature=2.0, top_k=VOCAB_SIZE + 1, logprobs=20, prompt_logprobs=3, n=2),
        SamplingParams(seed=2, temperature=1.5, repetition_penalty=1.4, presence_penalty=0.5, top_p=0.9),
        SamplingParams(seed=3, temperature=1.0, min_tokens=5, stop_token_ids=(last, 7), logit_bias={9: 3.0}),
        SamplingParams(temperature=0.0, use_beam_search=True, n=3),
        SamplingParams(seed=4, temperature=1.0, bad_words=((5,), (6, 7))),
    ]
    asked = [
        EngineRequest(
            f"{kind} {number}", "t", [3, 9, 4, 11], single_adapter(versions[kind]) if kind else (), params
        )
        for kind in kinds
        for number, params in enumerate(replace(form, max_tokens=12) for form in forms)
    ]

    def run(*groups: list[EngineRequest]) -> dict[str, tuple[Any, ...]]:
        engine = make_engine(kit, source, 900, kernels=KERNELS, max_num_seqs=60)
        found = drive(engine, list(groups))
        assert all(one.error is None for one in found.values())
        return {key: (one.token_ids, one.logprobs, one.prompt_logprobs) for key, one in found.items()}

    together = run(asked)
    # A third has each kind and each form.
    for request in asked if soak else asked[::3]:
        for key, found in run([request]).items():
            assert found == together[key], key
    own, others = (
        {token for key, (ids, *_) in together.items() if key.startswith(kind) for token in ids}
        for kind in ("trained", "None")
    )
    assert max(own) >= VOCAB_SIZE > max(others)


def test_ids_of_added_tokens_are_those_of_their_adapter_alone(
    resized_kits: Callable[[str], ResizedKit],
) -> None:
    kit = resized_kits("llama")
    llm = LLM(kit.directory, kernels=KERNELS, pool_bytes=kit.pool_bytes(900))
    for token, kind, message in (
        (VOCAB_SIZE, None, f"token id {VOCAB_SIZE}, which is out of vocabulary; this model's ids are 0 to"),
        (VOCAB_SIZE, "plain", "has 0 added tokens behind those of the base model, and the request has ids for 1"),
        (VOCAB_SIZE + 1, "added", "has 1 added tokens behind those of the base model, and the request has ids for 2"),
        (VOCAB_SIZE + 5000, "added", f"token id {VOCAB_SIZE + 5000}, which is out of vocabulary"),
    ):  # fmt: skip
        with pytest.raises(RequestRefused, match=message):
            llm.generate([[1, token]], GREEDY, kit.path(kind))
        with pytest.raises(RequestRefused):
            llm.generate([[1]], replace(GREEDY, logit_bias={token: 1.0}), kit.path(kind))
    # A grammar allows an added token only where it ends the answer.
    stop = VOCAB_SIZE + NUM_ADDED["trained"] - 1
    allowed = replace(GREEDY, allowed_token_ids=(4, stop), logit_bias={stop: 100.0}, max_tokens=3)
    (given,) = llm.generate([[1, 2]], allowed, kit.adapters["trained"])
    assert given.token_ids == [stop] * 3


def test_rows_for_added_tokens_that_are_not_whole_are_refused_by_name(tmp_path: Path) -> None:
    old = make_kit(tmp_path / "old", "llama", {}, num_hidden_layers=1)
    size = VOCAB_SIZE + 3
    kinds: dict[str, dict[str, object]] = {
        "adapted": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
        "gap": {"trainable_token_indices": {"embed_tokens": [size - 1], "lm_head": [size - 1]}},
        "one": {"modules_to_save": ["embed_tokens"]},
        "fewer": {"trainable_token_indices": {"embed_tokens": [5, 6], "lm_head": [5, 6]}},
    }
    llm = LLM(old.directory, kernels=KERNELS, pool_bytes=old.pool_bytes(900))
    for kind, message in (
        ("adapted", "has rows of its own and a LoRA pair; train one of them"),
        ("gap", rf"rows for 3 tokens behind the {VOCAB_SIZE} of the base model, but none for token {VOCAB_SIZE};"),
        ("one", rf"have 3 and 0 rows behind the {VOCAB_SIZE} of the base model; added tokens need a row of each"),
        ("many", r"1025 tokens were added .* at most 1024 .* after resize_token_embeddings\(1153\)"),
        ("fewer", r"trainable_tokens_delta' has shape \[2, 48\]; the config requires \[1, 48\]"),
        ("other", rf"the first {VOCAB_SIZE} rows of tensor .*: this copy differs from the base model's"),
    ):  # fmt: skip
        base = AutoModelForCausalLM.from_pretrained(old.directory)
        base.resize_token_embeddings(VOCAB_SIZE + 1025 if kind == "many" else size, mean_resizing=False)
        if kind == "other":
            base.get_input_embeddings().weight.data[5] += 1
        fields = {"r": 3, "target_modules": ["v_proj"], **kinds.get(kind, {})}
        with quiet_peft():
            model = get_peft_model(base, LoraConfig(**fields))
            model.save_pretrained(tmp_path / kind, save_embedding_layers=kind not in ("gap", "one"))
        if kind == "fewer":
            config = tmp_path / kind / "adapter_config.json"
            text = re.sub(r"5,\s+6", "5", config.read_text(encoding="utf-8"))
            config.write_text(text, encoding="utf-8")
        with pytest.raises(AdapterInvalid, match=message):
            llm.generate([[1, 2, 3]], GREEDY, tmp_path / kind)
