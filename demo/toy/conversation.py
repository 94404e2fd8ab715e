"""Converts a conversation to tokens: one token for each byte, a few special tokens, and the chat template.

Every text consists of bytes, so no unknown token is needed: encoding and decoding return the exact text, and words that
were never seen in training are handled like any others. A conversation is `<bos>`, an optional `<|system|>` message,
`<|user|>` with the sentence, `<|assistant|>` with the answer, and `<eos>`. The model is trained on single questions, so
the template drops all messages before the last user message.

This module imports neither the tasks nor the training code.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["IGNORED", "MAX_TOKENS", "Batch", "Conversation", "collate", "make_tokenizer"]

MAX_TOKENS = 512
IGNORED = -100  # the label that torch's cross_entropy skips

_PAD, _BOS, _EOS, _SYSTEM, _USER, _ASSISTANT = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
# The two spare tokens round the vocabulary up to 264, a multiple of 8.
_SPECIAL_TOKENS = (_PAD, _BOS, _EOS, _SYSTEM, _USER, _ASSISTANT, "<|spare_0|>", "<|spare_1|>")

_CHAT_TEMPLATE = """\
{%- set shows_last_turn_only = true -%}
{%- set state = namespace(system='', last_user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- set state.system = message.content -%}
{%- elif message.role == 'user' -%}{%- set state.last_user = loop.index0 -%}
{%- elif message.role != 'assistant' -%}
{{- raise_exception('role ' ~ message.role ~ ' is not one of system, user, assistant') -}}
{%- endif -%}
{%- endfor -%}
{%- if state.last_user < 0 -%}{{- raise_exception('a conversation needs a user message') -}}{%- endif -%}
{{- bos_token -}}
{%- if state.system -%}{{- '<|system|>' ~ state.system -}}{%- endif -%}
{{- '<|user|>' ~ messages[state.last_user].content -}}
{%- for message in messages[state.last_user + 1:] if message.role == 'assistant' -%}
{{- '<|assistant|>' ~ message.content ~ eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One question and its expected answer. `system` is empty if there is no system message."""

    system: str
    user: str
    answer: str

    @property
    def prompt(self) -> str:
        """The text that the chat template renders before the answer."""
        system = _SYSTEM + self.system if self.system else ""
        return _BOS + system + _USER + self.user + _ASSISTANT


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and labels, both int64 [B, T], padded on the right. Labels outside the answers are IGNORED."""

    ids: torch.Tensor
    labels: torch.Tensor


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Create the byte tokenizer with its chat template. `decode(encode(text)) == text` holds for every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: position for position, token in enumerate((*_SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BOS,
        eos_token=_EOS,
        pad_token=_PAD,
        additional_special_tokens=list(_SPECIAL_TOKENS[3:]),
        chat_template=_CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _padded_length(num_tokens: int) -> int:
    """Round up to one of a few lengths, because oneDNN prepares its kernels anew for every shape."""
    step = 16 if num_tokens <= 96 else 32
    return -(-num_tokens // step) * step


def collate(tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Conversation]) -> Batch:
    """Tokenise and pad conversations, each with its answer and `<eos>`."""
    prompts = tokenizer([c.prompt for c in conversations])["input_ids"]
    answers = tokenizer([c.answer + _EOS for c in conversations])["input_ids"]
    T = _padded_length(
        max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    )
    ids = torch.full((len(conversations), T), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return Batch(ids, labels)
