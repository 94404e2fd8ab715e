"""Small tokenizers of the kinds that served models have, saved as transformers saves them."""

from collections.abc import Callable
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
    """Like Llama 3 and Qwen2: BPE over bytes, so one character may span several tokens."""
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
    """Like Llama 2 and Mistral: pieces with a marker for spaces, and a byte token for each byte that no piece
    covers."""
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


def _with_decoder(pieces: list[str], decoder: decoders.Decoder | None) -> Tokenizer:
    """A vocabulary of whole words. It shows how a decoder treats any sequence of pieces."""
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(["<unk>", *_SPECIAL, *pieces]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return tokenizer


_BYTES = [f"<0x{byte:02X}>" for byte in b'\n"\xc3\xa9\xe6\x97\xa5\xf0\x9f\x8e\x89\x80\xe0\xed\xff']
_MARKED = ["▁", "▁▁", "▁a", "a", "b▁", "é", "▁日本", "<0x+A>", "<0xGG>"]


def gemma_like() -> Tokenizer:
    """Byte fallback with a decoder that keeps a leading space."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _with_decoder([*_MARKED, *_BYTES], decoders.Sequence(steps))


def metaspace() -> Tokenizer:
    """Like XGLM: the space markers of the first token are dropped, and all other markers become spaces."""
    return _with_decoder(_MARKED, decoders.Metaspace())


def word_piece() -> Tokenizer:
    """Like BERT: a space between words, but none before the continuation of a word or before punctuation."""
    return _with_decoder(["a", "##b", "##", "é", ".", "'", "s", "n't", " do not"], decoders.WordPiece())


def word_suffix() -> Tokenizer:
    """Like CTRL and the first GPT: a marker ends each word and becomes a space, except in the last token."""
    return _with_decoder(["a</w>", "b", "</w>", "é</w>", "c"], decoders.BPEDecoder())


def undecoded() -> Tokenizer:
    """A tokenizer without a decoder: the library joins all tokens with spaces."""
    return _with_decoder(["a", "b", " ", "é"], None)


def connectionist() -> Tokenizer:
    """A tokenizer with a decoder that slora cannot apply step by step."""
    return _with_decoder(["a", "b", "|", "<pad>"], decoders.CTC())


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "gemma_like": gemma_like,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "word_suffix": word_suffix,
    "undecoded": undecoded,
    "connectionist": connectionist,
}


def write_tokenizer(directory: Path, tokenizer: Tokenizer, chat_template: str | None = CHAT_TEMPLATE) -> None:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    if chat_template is not None:
        wrapped.chat_template = chat_template
    wrapped.save_pretrained(directory)
