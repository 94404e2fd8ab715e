"""transformers + peft as the judge of our tokens, by teacher forcing: one forward pass over prompt and answer.

Two float32 programs that add in different orders may disagree where two tokens are all but equally likely. Equal
therefore means: the same token, or a margin between the judge's two best below `MARGIN`; the excused are counted.
Where our log-probabilities are at hand they must be the judge's, too: they tell what changes scores but no order, and
what is too small for a token to show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.peft_adapters import quiet_peft

MARGIN = 1e-4
MOST_EXCUSED = 1e-3
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Verdict:
    """positions: tokens judged. excused: they differ from the judge's, who was undecided. wrong: what remains.

    logprob_error: the farthest that one of our log-probabilities is from the judge's; None where none was given.
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
        few_excused = self.excused <= MOST_EXCUSED * self.positions
        return self.wrong == 0 and few_excused and (self.logprob_error or 0.0) < LOGPROB_TOLERANCE


class Oracle:
    """The model in `directory` with PEFT adapters loaded by name. Judges one request at a time."""

    def __init__(
        self, directory: Path, adapters: dict[str, Path], dtype: torch.dtype = torch.float32
    ) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        config = self._model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        self._rope_switch: int | None = (
            rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None
        )
        for name, path in adapters.items():
            self._load(name, path)

    def in_float32(self) -> "Oracle":
        """The same weights, as they were rounded, with arithmetic in float32. Changes this oracle."""
        self._model = self._model.float()
        return self

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], adapter: str | None) -> Tensor:
        """float32 [T, vocab_size]: row t says what comes after token t."""
        inputs = torch.tensor([list(token_ids)])
        if not isinstance(self._model, PeftModel):
            return self._model(inputs).logits[0].float()
        if adapter is None:
            with self._model.disable_adapter():
                return self._model(inputs).logits[0].float()
        self._model.set_adapter(adapter)
        return self._model(inputs).logits[0].float()

    def answer_logits(self, prompt: Sequence[int], answer: Sequence[int], adapter: str | None) -> Tensor:
        """float32 [len(answer), vocab_size]: what each token of the answer was chosen from.

        Where the rope has other factors for sequences longer than `_rope_switch`, the tokens chosen before that are
        judged by a pass over what was there then.
        """
        tokens = [*prompt, *answer]
        logits = self.logits(tokens, adapter)
        if self._rope_switch is not None and len(prompt) <= self._rope_switch < len(tokens):
            short = self.logits(tokens[: self._rope_switch], adapter)
            logits = torch.cat((short, logits[self._rope_switch :]))
        return logits[len(prompt) - 1 : -1]

    def judge(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        adapter: str | None,
        logprobs: Sequence[float] | None = None,
    ) -> Verdict:
        """logprobs: ours, of the answer's tokens."""
        logits, tokens = self.answer_logits(prompt, answer, adapter), torch.tensor(list(answer))
        best, chosen = logits.topk(2, dim=-1)
        differs = chosen[:, 0] != tokens
        undecided = best[:, 0] - best[:, 1] < MARGIN
        error = None
        if logprobs is not None:
            theirs = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
            error = (theirs - torch.tensor(list(logprobs))).abs().max().item()
        wrong = int((differs & ~undecided).sum())
        return Verdict(len(answer), int((differs & undecided).sum()), wrong, error)

    def _load(self, name: str, path: Path) -> None:
        with quiet_peft():
            if isinstance(self._model, PeftModel):
                self._model.load_adapter(path, adapter_name=name)
            else:
                self._model = PeftModel.from_pretrained(self._model, path, adapter_name=name)
