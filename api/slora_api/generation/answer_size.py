"""How much an answer would have to list, worked out from the request before the engine sees it."""

from dataclasses import dataclass

from slora_api.errors import BadRequest
from slora_api.request_bounds import RequestBounds

__all__ = ["AnswerSize"]


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """What one request asks to be told.

    num_choices: answers to each prompt that are computed. logprobs: the likeliest tokens listed beside each token of
    the answer, and of an echoed prompt; None if there are none. scores: `prompt_logprobs`; None if not asked for.
    param: the field that asks for log-probabilities.

    Worked example: n 128, echo, logprobs 20 and prompt_logprobs 20, on a prompt of 1,000 tokens with 16 to come, are
    128 x (1,016 x 21 + 1,000 x 21) = 5,419,008 log-probabilities.
    """

    num_choices: int
    logprobs: int | None
    scores: int | None
    echoes: bool
    param: str = "logprobs"

    def answer_room(self, bounds: RequestBounds, num_prompts: int, prompt_tokens: int) -> int:
        """Tokens for each answer that the bounds leave, if `num_prompts` prompts have that many tokens in all."""
        answers = self.num_choices * num_prompts
        room = (bounds.answer_tokens - self._echoed(prompt_tokens)) // answers
        if self.logprobs is not None:
            left = bounds.answer_logprobs - self._prompt_logprobs(prompt_tokens)
            room = min(room, left // (answers * (self.logprobs + 1)))
        return max(1, room)

    def check(self, bounds: RequestBounds, prompt_tokens: int, answer_tokens: int) -> None:
        """answer_tokens: one answer to each prompt, all together. Raises BadRequest."""
        drawn = self.num_choices * answer_tokens
        tokens = drawn + self._echoed(prompt_tokens)
        if tokens > bounds.answer_tokens:
            raise BadRequest(
                f"The request asks for {tokens} tokens, those of all choices and of echoed prompts together; this "
                f"server answers with at most {bounds.answer_tokens}. Send fewer prompts, or a smaller `n` or "
                "`max_tokens`.",
                "max_tokens",
            )
        listed = self._prompt_logprobs(prompt_tokens)
        if self.logprobs is not None:
            listed += drawn * (self.logprobs + 1)
        if listed > bounds.answer_logprobs:
            param = self.param if self.logprobs is not None else "prompt_logprobs"
            raise BadRequest(
                f"`{param}` asks for {listed} log-probabilities, those of all choices together; this server lists at "
                f"most {bounds.answer_logprobs}. Ask for fewer of each token, or send fewer prompts or a smaller `n` "
                "or `max_tokens`.",
                param,
            )

    def _echoed(self, prompt_tokens: int) -> int:
        return self.num_choices * prompt_tokens if self.echoes else 0

    def _prompt_logprobs(self, prompt_tokens: int) -> int:
        listed = 0
        if self.echoes and self.logprobs is not None:
            listed += self.num_choices * prompt_tokens * (self.logprobs + 1)
        if self.scores is not None:
            listed += self.num_choices * prompt_tokens * (self.scores + 1)
        return listed
