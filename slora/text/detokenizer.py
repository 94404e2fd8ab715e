"""One answer's text as its tokens arrive, without ever sending what a later token could change.

Two things may hold text back: a decoder that needs more tokens to know it, and a tail that may be the beginning of a
stop string. The cost of a token depends neither on the length of the answer nor on the length of the stop strings.
"""

from collections.abc import Sequence

from slora.text.stop_matcher import StopMatcher, StopString
from slora.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """`stopped` turns true when a stop string was found; the text before it is all there is.

    All that `push` and `flush` return, joined, is `tokenizer.decode` of all tokens up to the first stop string,
    however many tokens each `push` gets.

    min_tokens: a stop string that ends in the text of the first min_tokens tokens is ordinary text, as in vLLM
    (v1/engine/detokenizer.py). One that begins there and ends later counts.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[StopString] = (), min_tokens: int = 0) -> None:
        self.stopped = False
        self._decoder = tokenizer.start_decoding()
        self._stops = StopMatcher(stops)
        self._num_immune_tokens = min_tokens if stops else 0
        self._immune_chars = 0  # of the text that the decoder has not given yet
        self._held = ""  # given by the decoder, held back because it may begin a stop string

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes tokens in and returns the text that is now certain; nothing after a stop string."""
        if self.stopped:
            return ""
        num_immune = min(self._num_immune_tokens, len(token_ids))
        sent = ""
        if num_immune > 0:
            text = self._decoder.push(token_ids[:num_immune])
            self._num_immune_tokens -= num_immune
            self._immune_chars = len(text)
            sent = self._pass_stops(text)
            if self._num_immune_tokens == 0:
                self._immune_chars = self._decoder.count_complete()
        return sent + self._pass_stops(self._decoder.push(token_ids[num_immune:]))

    def flush(self) -> str:
        """The rest, when no more tokens come: what was held back and did not become a stop string."""
        if self.stopped:
            return ""
        text = self._decoder.finish()
        if self._num_immune_tokens > 0:
            self._immune_chars = len(text)
        sent = self._pass_stops(text)
        return sent if self.stopped else sent + self._held

    def _pass_stops(self, text: str) -> str:
        """Appends decoded text. Returns what is certain of the text that has not been sent."""
        found = self._stops.search(text, self._immune_chars)
        self._immune_chars = max(0, self._immune_chars - len(text))
        known = self._held + text
        if found is not None:
            self.stopped = True
            end, length = found
            return known[: len(self._held) + end - length]
        num_certain = len(known) - self._stops.num_open
        self._held = known[num_certain:]
        return known[:num_certain]
