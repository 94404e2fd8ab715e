"""Tokens to text as they come, without ever sending what a later token could change.

Two things may hold text back: bytes that are not yet a whole character, and a tail that could be the start of a
stop string. Decoding starts a few tokens back, because how a token reads can depend on those before it (a leading
space, a byte sequence), but not on the whole text, so the cost of a token does not grow with the answer.
"""

from slora.text.tokenizer import Tokenizer

_REPLACEMENT = "�"


class Detokenizer:
    """One answer's text. `stopped` turns true when a stop string was found; the text before it is all there is.

    min_tokens: a stop string that ends in the text of that many first tokens is text like any other, as in vLLM
    (v1/engine/detokenizer.py); one that only begins there counts.

    Invariant: tokens [0, _sent) are in the text already given; [_prefix, _sent) are decoded again as context.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens if stop else 0
        self._tokens: list[int] = []
        self._prefix = 0
        self._sent = 0
        self._held = ""
        self._immune_chars = 0  # of what is held: no stop string may end there

    def push(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """Takes tokens in and returns the text that is now certain; nothing after a stop string."""
        if self.stopped:
            return ""
        num_immune = max(0, self._min_tokens - len(self._tokens))
        text = ""
        for part in (token_ids[:num_immune], token_ids[num_immune:]):
            if not part:
                continue
            self._tokens.extend(part)
            self._held += self._decode_new(final=False)
            if len(self._tokens) <= self._min_tokens:
                self._immune_chars = len(self._held)
            text += self._pass_stops(final=False)
        return text

    def flush(self) -> str:
        """The rest, when no more tokens come: what was held back and did not become a stop string."""
        if self.stopped:
            return ""
        self._held += self._decode_new(final=True)
        return self._pass_stops(final=True)

    def _decode_new(self, *, final: bool) -> str:
        context = self._tokenizer.decode(self._tokens[self._prefix : self._sent])
        text = self._tokenizer.decode(self._tokens[self._prefix :])
        if len(text) <= len(context) or (text.endswith(_REPLACEMENT) and not final):
            return ""
        self._prefix, self._sent = self._sent, len(self._tokens)
        return text[len(context) :]

    def _pass_stops(self, *, final: bool) -> str:
        # The one that is complete first wins, as if characters came one by one: how many tokens come at once, and
        # where they fall, must not change the text.
        immune = self._immune_chars
        starts = [(self._held.find(stop, max(0, immune - len(stop) + 1)), stop) for stop in self._stop]
        found = [(at + len(stop), at) for at, stop in starts if at >= 0]
        if found:
            self.stopped = True
            _, at = min(found)
            return self._held[:at]
        keep = 0 if final else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        self._immune_chars = max(0, immune - len(certain))
        return certain


def _overlap(text: str, stop: str) -> int:
    """The longest tail of `text` that `stop` starts with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
