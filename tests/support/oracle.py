"""transformers + peft as the reference for our tokens. One forward pass over prompt and answer (teacher forcing)
checks them.

Two float32 programs that add in different orders may disagree where two tokens are almost equally probable. A token
therefore passes if it is the reference's argmax, or if the gap between the reference's two best tokens is below
`MARGIN`. Tokens that pass by the second rule are counted as excused.

Where the engine's log-probabilities are given, they must match the reference too. They show errors that are too small
to change the argmax, or that change all scores alike.

In a mixture of experts, two experts of a token may be almost equally good for its router as well. Which of them is
chosen then changes the log-probabilities of this token and of those after it, which are not compared.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig

from slora.models.model_structure import find_auto_class
from slora.verify.peft_reference import compute_forced_logits, find_rope_switch
from tests.support.peft_adapters import quiet_peft

MARGIN = 1e-4
MOST_EXCUSED = 1e-3
LOGPROB_TOLERANCE = 1e-4
# Of the logits of the last expert that is chosen and of the next one. Their rounding errors are about 1e-6.
ROUTER_MARGIN = 1e-5


@dataclass(frozen=True, slots=True)
class Verdict:
    """positions: number of tokens judged. excused: tokens that differ from the reference's, within `MARGIN`. wrong:
    other tokens that differ.

    logprob_error: the largest difference between our log-probabilities and the reference's. None if none were given.
    """

    positions: int = 0
    excused: int = 0
    wrong: int = 0
    logprob_error: float | None = None

    def __str__(self) -> str:
        tokens = f"{self.positions} tokens, {self.excused} excused, {self.wrong} wrong"
        if self.logprob_error is None:
            return tokens
        return f"{tokens}, log-probabilities off by {self.logprob_error:.1e} at most"

    def __add__(self, other: "Verdict") -> "Verdict":
        return Verdict(
            self.positions + other.positions,
            self.excused + other.excused,
            self.wrong + other.wrong,
            max((e for e in (self.logprob_error, other.logprob_error) if e is not None), default=None),
        )

    @property
    def equal(self) -> bool:
        return self.is_within(LOGPROB_TOLERANCE)

    def is_within(self, tolerance: float) -> bool:
        """tolerance: of the log-probabilities."""
        few_excused = self.excused <= MOST_EXCUSED * self.positions
        return self.wrong == 0 and few_excused and (self.logprob_error or 0.0) < tolerance


class Oracle:
    """The model in `directory` with PEFT adapters, each loaded at its first use. It judges one request at a time.

    trained: models with the adapters of these names, which PEFT then need not load.
    """

    def __init__(
        self,
        directory: Path,
        adapters: Mapping[str, Path],
        dtype: torch.dtype = torch.float32,
        trained: Mapping[str, PeftModel] | None = None,
    ) -> None:
        self._base = (
            find_auto_class(AutoConfig.from_pretrained(directory))
            .from_pretrained(directory, dtype=dtype, attn_implementation="eager")
            .eval()
        )
        self._rope_switch = find_rope_switch(self._base.config)
        self._paths = adapters
        # The adapters that share a model.
        self._adapted: PeftModel | None = None
        self._chosen: str | None = None
        # Trained biases and rows replace those of the base model, so such an adapter has a model of its own.
        self._apart: dict[str, PeftModel] = {name: model.eval() for name, model in (trained or {}).items()}

    def in_float32(self) -> "Oracle":
        """Converts this oracle to float32 arithmetic on the same, already rounded weights. Changes the oracle in
        place."""
        for name in self._paths:
            self._choose(name)
        self._base = self._base.float()
        if self._adapted is not None:
            self._adapted = self._adapted.float()
        return self

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], adapter: str | None) -> Tensor:
        """float32 [T, vocab_size]: row t holds the logits of the token after token t."""
        return self._choose(adapter)(torch.tensor([list(token_ids)])).logits[0].float()

    @torch.inference_mode()
    def embedding(
        self, token_ids: Sequence[int], adapter: str | None, *, mean: bool, normalize: bool = True
    ) -> Tensor:
        """float32 [H]: transformers' `last_hidden_state` of the prompt alone, pooled."""
        model = self._choose(adapter)
        causal = model.get_base_model() if isinstance(model, PeftModel) else model
        hidden = causal.base_model(torch.tensor([list(token_ids)])).last_hidden_state[0].float()
        pooled = hidden.mean(0) if mean else hidden[-1]
        return nn.functional.normalize(pooled, dim=0) if normalize else pooled

    def answer_logits(self, prompt: Sequence[int], answer: Sequence[int], adapter: str | None) -> Tensor:
        """float32 [len(answer), vocab_size]: the logits from which each token of the answer was chosen."""

        def forward(token_ids: Sequence[int]) -> Tensor:
            return self.logits(token_ids, adapter)

        return compute_forced_logits(forward, prompt, answer, self._rope_switch)[len(prompt) - 1 : -1]

    def judge(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        adapter: str | None,
        logprobs: Sequence[float] | None = None,
    ) -> Verdict:
        """logprobs: the engine's log-probabilities of the answer's tokens."""
        logits, tokens = self.answer_logits(prompt, answer, adapter), torch.tensor(list(answer))
        best, chosen = logits.topk(2, dim=-1)
        differs = chosen[:, 0] != tokens
        undecided = best[:, 0] - best[:, 1] < MARGIN
        error = None
        if logprobs is not None:
            theirs = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
            error = (theirs - torch.tensor(list(logprobs))).abs().max().item()
            if error >= LOGPROB_TOLERANCE and self.least_router_gap(prompt, answer, adapter) < ROUTER_MARGIN:
                error = None
        wrong = int((differs & ~undecided).sum())
        return Verdict(len(answer), int((differs & undecided).sum()), wrong, error)

    @torch.inference_mode()
    def least_router_gap(self, prompt: Sequence[int], answer: Sequence[int], adapter: str | None) -> float:
        """The smallest gap between the logits of the last expert of a token and of the next one, in any layer. It is
        infinite for a model without experts.
        """
        gaps, model = [float("inf")], self._choose(adapter)

        def note_gap(router: nn.Module, inputs: tuple[Tensor, ...], outputs: object) -> None:
            logits = nn.functional.linear(inputs[0].flatten(0, -2).double(), router.weight.double())
            best = logits.topk(router.top_k + 1, dim=-1).values
            gaps.append((best[:, -2] - best[:, -1]).min().item())

        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        hooks = [router.register_forward_hook(note_gap) for router in routers]
        model(torch.tensor([[*prompt, *answer]]))
        for hook in hooks:
            hook.remove()
        return min(gaps)

    def token_logprobs(
        self, prompt: Sequence[int], answer: Sequence[int], adapter: str | None
    ) -> list[float]:
        """The reference's log-probabilities of the answer's tokens."""
        logprobs = self.answer_logits(prompt, answer, adapter).log_softmax(dim=-1)
        found: list[float] = logprobs.gather(1, torch.tensor(list(answer))[:, None])[:, 0].tolist()
        return found

    @torch.inference_mode()
    def beam_search(
        self, prompt: Sequence[int], adapter: str | None, stop_ids: Sequence[int], **settings: object
    ) -> tuple[list[list[int]], list[float]]:
        """The answers of transformers' own beam search and their scores, best first. Each answer ends at its stop
        token.

        settings: fields of GenerationConfig, with two beams or more.
        """
        inputs = torch.tensor([list(prompt)])
        found = self._choose(adapter).generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            eos_token_id=list(stop_ids) or None,
            **settings,
        )
        rows = found.sequences[:, len(prompt) :].tolist()
        return [_up_to_end(row, stop_ids) for row in rows], found.sequences_scores.tolist()

    def add_sum(self, name: str, weights: Mapping[str, float]) -> None:
        """Adds a weighted sum of adapters as an adapter. With "cat", which concatenates factors, the sum is exact."""
        for one in weights:
            self._load(one)
        assert self._adapted is not None
        self._adapted.add_weighted_adapter(
            list(weights), list(weights.values()), name, combination_type="cat"
        )

    def _choose(self, adapter: str | None) -> nn.Module:
        """The model with the adapter. In peft, choosing or disabling an adapter takes longer than a tiny model's
        step, so the base is a model of its own, and an adapter that is chosen already is not chosen again."""
        if adapter is None:
            return self._base
        if adapter not in self._apart:
            self._load(adapter)
        if adapter in self._apart:
            return self._apart[adapter]
        assert self._adapted is not None
        if adapter != self._chosen:
            self._adapted.set_adapter(adapter)
            self._chosen = adapter
        return self._adapted

    def _load(self, name: str) -> None:
        """Loads the adapter into the model that adapters share, or into a model of its own."""
        if self._adapted is not None and name in self._adapted.peft_config:
            return
        path = self._paths[name]
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        # The first use may be in inference mode, whose tensors PEFT cannot mark as trained later.
        with quiet_peft(), torch.inference_mode(False):
            # PEFT wraps the same parameters for all adapters of a model.
            others = (
                "modules_to_save",
                "trainable_token_indices",
                "target_parameters",
                "ensure_weight_tying",
            )
            if config["bias"] != "none" or any(config.get(field) for field in others):
                own = copy.deepcopy(self._base)
                self._apart[name] = PeftModel.from_pretrained(own, path, adapter_name=name)
            elif self._adapted is None:
                own = copy.deepcopy(self._base)
                self._adapted = PeftModel.from_pretrained(own, path, adapter_name=name)
            else:
                self._adapted.load_adapter(path, adapter_name=name)


def _up_to_end(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """The tokens up to and including the stop token, without the padding after it."""
    end = next((place for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[: end + 1]
