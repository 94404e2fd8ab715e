"""Small tokenizers of the two kinds that served models bring, saved as transformers saves them."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = (
    "The quick brown fox jumps over the lazy dog. Größe, naïve café, 日本語のテキスト, emoji 👩‍👩‍👧 🎉.\n"
    "  def f(x):\n    return x + 1  # 1234567890\n" * 4
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """As Llama 3 and Qwen2: BPE over bytes, so that a character may be spread over tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\s?\w+|\s?[^\w\s]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: pieces with a mark for spaces, and a token for each byte of what no piece covers."""
    pieces = [
        "<unk>",
        *_SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"aehlortw",
        "▁h",
        "lo",
        "▁w",
    ]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("l", "o"), ("▁", "w")]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer, chat_template: str | None = CHAT_TEMPLATE) -> None:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    if chat_template is not None:
        wrapped.chat_template = chat_template
    wrapped.save_pretrained(directory)
