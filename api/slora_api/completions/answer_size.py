"""Computes the number of tokens and log-probabilities of an answer from its request, before the engine sees it."""

from dataclasses import dataclass

from slora_api.core.errors import BadRequest
from slora_api.http.request_bounds import RequestBounds


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """The number of tokens and log-probabilities that a request asks the answer to contain.

    num_choices: number of answers to each prompt.
    logprobs: number of most probable tokens to list for each token of the answer and of an echoed prompt; None if no
    log-probabilities are listed.
    prompt_logprobs: the value of the field of this name; None if the field was not sent.
    echoes: whether each choice repeats the text of its prompt.
    lists_prompts: whether each choice lists the token ids of its prompt.
    param: the field that asks for log-probabilities.
    length_param: the field that sets the number of tokens.

    Worked example: a prompt of 1,000 tokens and max_tokens 16, with n 128, echo, logprobs 20 and prompt_logprobs 20.
    The answer lists 128 x (1,016 x 21 + 1,000 x 21) = 5,419,008 log-probabilities.
    """

    num_choices: int
    logprobs: int | None
    prompt_logprobs: int | None
    echoes: bool
    param: str = "logprobs"
    lists_prompts: bool = False
    length_param: str = "max_tokens"

    def answer_room(self, bounds: RequestBounds, num_prompts: int, prompt_tokens: int) -> int:
        """Returns the maximum number of tokens per answer that the bounds allow; at least 1. prompt_tokens: tokens of
        all prompts together.
        """
        answers = self.num_choices * num_prompts
        room = (bounds.answer_tokens - self._echoed(prompt_tokens)) // answers
        if self.logprobs is not None:
            left = bounds.answer_logprobs - self._num_prompt_logprobs(prompt_tokens)
            room = min(room, left // (answers * (self.logprobs + 1)))
        return max(1, room)

    def check(self, bounds: RequestBounds, prompt_tokens: int, answer_tokens: int) -> None:
        """Raises BadRequest if the answer would exceed a bound.

        prompt_tokens: tokens of all prompts together. answer_tokens: sum of the tokens of one answer to each prompt.
        """
        drawn = self.num_choices * answer_tokens
        tokens = drawn + self._echoed(prompt_tokens)
        if tokens > bounds.answer_tokens:
            raise BadRequest(
                f"The request asks for {tokens} tokens in all choices and repeated prompts together; "
                f"this server returns at most {bounds.answer_tokens}. Send fewer prompts, or a "
                f"smaller `n` or `{self.length_param}`.",
                self.length_param,
            )
        listed = self._num_prompt_logprobs(prompt_tokens)
        if self.logprobs is not None:
            listed += drawn * (self.logprobs + 1)
        if listed > bounds.answer_logprobs:
            param = self.param if self.logprobs is not None else "prompt_logprobs"
            raise BadRequest(
                f"`{param}` asks for {listed} log-probabilities in all choices together; this server "
                f"returns at most {bounds.answer_logprobs}. Ask for fewer per token, or send fewer "
                f"prompts or a smaller `n` or `{self.length_param}`.",
                param,
            )

    def _echoed(self, prompt_tokens: int) -> int:
        return self.num_choices * prompt_tokens * (self.echoes + self.lists_prompts)

    def _num_prompt_logprobs(self, prompt_tokens: int) -> int:
        listed = 0
        if self.echoes and self.logprobs is not None:
            listed += self.num_choices * prompt_tokens * (self.logprobs + 1)
        if self.prompt_logprobs is not None:
            listed += self.num_choices * prompt_tokens * (self.prompt_logprobs + 1)
        return listed
