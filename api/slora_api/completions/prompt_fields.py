"""vLLM's fields that control how a text becomes the tokens of a prompt."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from slora_api.http.field_types import RequestModel, make_refusal

# vLLM's value for "as many as fit".
_AS_MANY_AS_FIT = -1


def _check_num_kept(value: int) -> int:
    if value < 1 and value != _AS_MANY_AS_FIT:
        raise make_refusal(
            "it is {value}, and must be at least 1, or -1 for as many tokens as fit into the context",
            value=value,
        )
    return value


class PromptFields(RequestModel):
    """The fields that control how a text becomes the tokens of a prompt. A prompt that is too long is refused, unless
    `truncate_prompt_tokens` permits the server to shorten it.

    add_special_tokens: as in vLLM, whether the tokenizer adds its special tokens, such as BOS; by default, it does.
    truncate_prompt_tokens: as in vLLM, how many tokens of each prompt are kept; -1 keeps as many as fit.
    truncation_side: the side that loses tokens. As in vLLM, the default is `left` for answers and `right` for
        embeddings.
    """

    hint_path = ""
    default_side: ClassVar[Literal["left", "right"]] = "left"

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, AfterValidator(_check_num_kept)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    @property
    def truncates(self) -> bool:
        return self.truncate_prompt_tokens is not None

    def truncate(self, token_ids: list[int], room: int) -> list[int]:
        """Returns the tokens that are kept. room: the maximum number of tokens of the prompt, at least 1."""
        num_kept = self.count_kept(len(token_ids), room)
        if (self.truncation_side or self.default_side) == "left":
            return token_ids[len(token_ids) - num_kept :]
        return token_ids[:num_kept]

    def count_kept(self, num_tokens: int, room: int) -> int:
        """Returns how many of `num_tokens` tokens `truncate` keeps."""
        wanted = self.truncate_prompt_tokens
        if wanted is None:
            return num_tokens
        return min(num_tokens, room if wanted == _AS_MANY_AS_FIT else wanted)
