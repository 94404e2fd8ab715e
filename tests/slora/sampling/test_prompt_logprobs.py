"""Log-probabilities of prompt tokens equal those of transformers and peft, however the prompt is chunked or
recomputed."""

import math
import random
from pathlib import Path

import pytest
import torch

from slora.core.messages import Outputs
from slora.core.request import (
    EngineRequest,
    FinishReason,
    StepOutput,
    TokenDelta,
    TokenLogprobs,
    single_adapter,
)
from slora.core.sampling_params import SamplingParams
from tests.support.cpu_kernels import CPU_KERNELS
from tests.support.driving import Answer, drive, make_engine, make_source, start_engine
from tests.support.engine_stack import over_the_wire
from tests.support.model_kit import Kits, ModelKit, spoil_token
from tests.support.tiny_models import VOCAB_SIZE


def check_scores(kit: ModelKit, prompt: list[int], adapter: str | None, count: int, answer: Answer) -> None:
    assert answer.error is None
    first, *others = answer.prompt_logprobs
    assert first is None and len(others) == len(prompt) - 1
    expected = kit.oracle.logits(prompt, adapter).log_softmax(-1)
    for row, token, found in zip(expected, prompt[1:], others, strict=False):
        assert found is not None and len(found.top) == count
        assert found.logprob == pytest.approx(row[token].item(), abs=1e-3)
        values = row.topk(count).values.tolist() if count else []
        assert [value for _, value in found.top] == pytest.approx(values, abs=1e-3)
        assert all(row[token].item() == pytest.approx(value, abs=1e-3) for token, value in found.top)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", CPU_KERNELS)
@pytest.mark.parametrize(
    ("num_pages", "settings"),
    [
        pytest.param(400, {}, marks=pytest.mark.soak),
        (400, {"max_num_seqs": 7, "max_num_batched_tokens": 7}),
        (45, {}),
    ],
    ids=["whole", "in chunks", "preempted"],
)
def test_prompt_logprobs_equal_those_of_transformers(
    kits: Kits, kernels: str, num_pages: int, settings: dict[str, int]
) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    rng = random.Random(2)
    asked = []
    for number, name in enumerate([None, *versions, None, *versions]):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 16, 33, 150)))]
        count = (0, 3, 20, None)[number % 4]
        # Some prompts are still in prefill while other requests decode. A request with several choices has one prompt.
        params = SamplingParams(
            max_tokens=rng.randint(1, 20),
            temperature=0,
            ignore_eos=True,
            prompt_logprobs=count,
            n=number % 3 + 1,
        )
        version = versions[name] if name is not None else None
        asked.append((EngineRequest(str(number), "t", prompt, single_adapter(version), params), name, count))
    engine = make_engine(kit, source, num_pages, kernels=kernels, **settings)
    answers = drive(engine, [[request] for request, _, _ in asked])
    assert (engine.stats().preemptions > 0) == (num_pages < 100)
    for request, name, count in asked:
        if count is None:
            assert answers[request.request_id].prompt_logprobs == []
        else:
            check_scores(kit, request.prompt_token_ids, name, count, answers[request.request_id])
    assert all(answer.prompt_logprobs == [] for name, answer in answers.items() if "/" in name)


def test_the_logits_of_a_long_prompt_are_computed_in_parts(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits("llama")
    engine, _ = start_engine(kit, 100)
    decoder = engine.runner.decoder
    rows: list[int] = []
    logits = type(decoder).logits

    def counted(self: object, hidden: torch.Tensor, *more: object) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(decoder, hidden, *more)

    monkeypatch.setattr(type(decoder), "logits", counted)
    prompt = [number % VOCAB_SIZE for number in range(400)]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    answer = drive(engine, [[EngineRequest("r", "t", prompt, (), params)]])["r"]
    check_scores(kit, prompt, None, 1, answer)
    assert max(rows) <= 64 and sum(rows) == 399 + len(answer.token_ids)


def test_prompt_logprobs_survive_the_wire_format() -> None:
    scored = (None, TokenLogprobs(-0.5, ((3, -0.5), (4, -1.25))), TokenLogprobs(-9.0, ()))
    delta = TokenDelta((5,), FinishReason.LENGTH, (TokenLogprobs(-0.1, ((5, -0.1),)),), 2, scored)
    output = StepOutput("r", delta)
    assert over_the_wire(Outputs([output.to_row("r")])).read() == [output]


@pytest.mark.parametrize("n", (1, 3))
@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_a_prompt_whose_scores_are_not_finite_fails_even_if_its_last_token_is_fine(
    kits: Kits, tmp_path: Path, kernels: str, n: int
) -> None:
    """The second token is NaN. The last tokens are so far behind that no window reaches back to it."""
    wrong, rng = 5, random.Random(1)
    kit = spoil_token(kits("mistral_window"), tmp_path / "spoilt", wrong, torch.nan)
    engine, _ = start_engine(kit, 300, kernels=kernels)
    prompt = [rng.randrange(6, VOCAB_SIZE) for _ in range(200)]

    def ask(name: str, token: int, count: int | None) -> EngineRequest:
        params = SamplingParams(
            max_tokens=4, temperature=0.7, seed=1, ignore_eos=True, prompt_logprobs=count, n=n
        )
        return EngineRequest(name, "t", [6, token, *prompt], (), params)

    answers = drive(engine, [[ask("unscored", wrong, None), ask("scored", wrong, 2), ask("fine", 7, 2)]])
    assert answers["unscored"].error is None and len(answers["unscored"].token_ids) == 4
    assert "logits of the base model were not finite" in str(answers["scored"].error)
    assert not answers["scored"].token_ids and not answers["scored"].prompt_logprobs
    assert answers["fine"].error is None
    assert all(math.isfinite(score.logprob) for score in answers["fine"].prompt_logprobs if score)
    assert engine.stats().not_finite == 1
