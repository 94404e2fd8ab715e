"""Tells whether two tokenizers split texts into the same tokens.

transformers may rewrite a tokenizer when it saves it, so equal tokenizers can have different files. They are compared
by the tokens of texts that exercise every step, and by a sample of the vocabulary.
"""

import hashlib

from tokenizers import Tokenizer

_NUM_SAMPLED = 997
_TEXTS = (
    "",
    " ",
    "   three  two one ",
    "\n\n\tdef f(x):\n        return x**2  # comment\r\n",
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they've said: \"don't!\" (it's 3.14159, 1,234,567 or 0x7F)",
    "ÀÉÎõü e\u0301 \u212b ﬁ ½ ß İ",
    "日本語のテキスト 한국어 中文 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧 🎉 \u200b\ufeff\u00a0 \U0001d518",
    "CamelCase snake_case https://example.org/a?b=c#d user@example.org",
    '{"key": ["value", null, true, -1.5e-7]} <tag attr="x"/> $\\frac{a}{b}$',
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 99999999999999999999",
)


def digest_tokenizer(tokenizer: Tokenizer) -> str:
    """Returns a digest that is equal for tokenizers that split texts alike. Added tokens are not part of it."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    hashed = hashlib.sha256()
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    for token_id in range(0, size, max(1, size // _NUM_SAMPLED)):
        hashed.update(f"{token_id} {tokenizer.id_to_token(token_id)}\n".encode())
    for text in _TEXTS:
        for add_special_tokens in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            hashed.update(f"{ids}\n".encode())
    return hashed.hexdigest()
