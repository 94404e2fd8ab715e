"""Collects the tokens of one request into its answer. `LLM`, `AsyncLLM` and the API use the same collector.

Stop strings are matched here, outside the engine. When a delta of a choice has a finish_reason, the caller must end
that choice in the engine. This module uses neither the engine nor HTTP.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from slora.core.request import EngineRequest, FinishReason, RequestTiming, TokenDelta, TokenLogprobs
from slora.core.sampling_params import SamplingParams
from slora.text.detokenizer import Detokenizer, StopString
from slora.text.incremental_decoder import TokenWidths
from slora.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AlignedToken:
    """One token and its part of a text."""

    token_id: int
    logprobs: TokenLogprobs | None  # None for the first token of a prompt.
    width: int  # Number of characters of the text that belong to the token.
    is_first: bool = False  # No earlier token has a part of the text. Some tokenizers drop a space there.


class TokenAligner:
    """Aligns the tokens of one answer with its text as both arrive.

    A token is held back until the text at its start is certain. So a token that a stop string cuts off is never
    returned.
    """

    def __init__(self, widths: TokenWidths) -> None:
        self._widths = widths
        self._unmeasured: deque[tuple[int, TokenLogprobs]] = deque()
        # Each token with the character position at which it starts in the text.
        self._held: deque[tuple[int, AlignedToken]] = deque()
        self._measured_chars = 0
        self._certain_chars = 0

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str
    ) -> tuple[AlignedToken, ...]:
        """Adds tokens and text. Returns the tokens whose first character is in the text added so far."""
        self._unmeasured.extend(zip(token_ids, logprobs, strict=True))
        self._measure(self._widths.push(token_ids))
        self._certain_chars += len(text)
        certain = []
        while self._held and self._held[0][0] < self._certain_chars:
            certain.append(self._held.popleft()[1])
        return tuple(certain)

    def flush(self) -> tuple[AlignedToken, ...]:
        """Returns the remaining tokens of an answer that did not end at a stop string."""
        self._measure(self._widths.finish())
        return tuple(token for _, token in self._held)

    def cut(self) -> tuple[AlignedToken, ...]:
        """Returns the remaining tokens of an answer that ended at a stop string. They have no part of the text."""
        held = [replace(token, width=0) for _, token in self._held]
        return (*held, *(AlignedToken(*token, 0) for token in self._unmeasured))

    def _measure(self, widths: Sequence[int]) -> None:
        for width in widths:
            token = AlignedToken(*self._unmeasured.popleft(), width, is_first=self._measured_chars == 0)
            self._held.append((self._measured_chars, token))
            self._measured_chars += width


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt. `token_ids` includes the stop token; `text` does not by default."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    # The tokens of `text`, each with its part of the text. Empty without a tokenizer or without logprobs.
    tokens: tuple[AlignedToken, ...] = ()
    stop: str | None = None  # The stop string that ended the answer.


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt with its `n` answers. With best_of, they are sorted by log-probability, the most probable one first.

    The properties are the fields of the first answer.
    """

    prompt_token_ids: list[int]
    choices: tuple[Choice, ...]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None unless requested.
    # Prompt tokens whose KV was found in the prefix cache. Ignored when two completions are compared.
    num_cached_tokens: int = field(default=0, compare=False)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.choices[0].logprobs


# Not frozen, for the same reason as `TokenDelta`.
@dataclass(slots=True, unsafe_hash=True)
class CompletionDelta:
    """The new part of answer `choice` to prompt `index`. The last delta of each answer has a finish_reason."""

    index: int
    text: str  # Text that no later token can change; it may lag behind token_ids.
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    choice: int = 0
    # Log-probabilities of the next prompt tokens. They come in separate deltas, before the answer.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: int = 0  # Cached prompt tokens, sent once, with the first token of answer 0.
    # The next tokens of the text, each with its part of the text. Empty without a tokenizer or without logprobs.
    tokens: tuple[AlignedToken, ...] = ()
    stop: str | None = None  # The stop string that ended the answer, in its last delta.


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What an answer shows of its tokens, and what only changes its text. The engine does not need it.

    A request body that has a field with the name of one of these sets it (`slora_api.completions.prompts`).
    """

    # The answer is empty and ends when its first token arrives. The engine has to compute that token: it computes
    # log-probabilities of a prompt only for a request that generates a token.
    prompt_only: bool = False
    shown: frozenset[str] = (
        frozenset()
    )  # Special tokens that are kept in the text, such as markers of tool calls.
    # Whether `tokens` also has tokens without a part of the text: the stop token, and tokens that a stop string cuts
    # off.
    return_token_ids: bool = False


_DEFAULT_OPTIONS = AnswerOptions()


class Answer:
    """The state of one request's answer. Without a tokenizer it has tokens but no text.

    request: the request to send to the engine. It may ask for logprobs that the caller did not request, which best_of
    needs to rank the answers.
    prompt_logprobs: log-probabilities of the prompt tokens, if they were requested. The list is complete when the first
    answer token arrives.
    timing: when the request passed the stages of the engine, if the caller has set it.
    """

    def __init__(
        self,
        request: EngineRequest,
        tokenizer: Tokenizer | None,
        index: int = 0,
        options: AnswerOptions = _DEFAULT_OPTIONS,
    ) -> None:
        self.index = index
        sampling = _with_logprobs(request.sampling)
        self.request = request if sampling is request.sampling else replace(request, sampling=sampling)
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.timing: RequestTiming | None = None
        self._sampling = request.sampling
        self.prompt_only = options.prompt_only
        self._num_cached = 0
        stops = [StopString(text) for text in request.sampling.stop]
        hidden: frozenset[str] = frozenset()
        if stops and tokenizer is not None and request.sampling.skip_special_tokens:
            hidden = tokenizer.find_special_parts(request.sampling.stop) - options.shown
        self._choices = [
            _ChoiceState(request.sampling, tokenizer, stops, options, hidden)
            for _ in range(request.sampling.num_choices)
        ]

    @property
    def lists_logprobs(self) -> bool:
        """Whether the caller requested log-probabilities of the answer's tokens."""
        return self._sampling.logprobs is not None

    @property
    def num_cached(self) -> int:
        """Number of prompt tokens found in the prefix cache."""
        return self._num_cached

    @property
    def num_generated(self) -> int:
        """Tokens that have arrived, for all choices together."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def is_over(self) -> bool:
        return all(choice.reason is not None for choice in self._choices)

    def wants(self, choice: int) -> bool:
        """Whether the choice is unfinished. Tokens may still arrive after a stop string has ended the choice."""
        return self._choices[choice].reason is None

    def take(self, delta: TokenDelta) -> CompletionDelta:
        """Adds the next tokens. If the result has a finish_reason, the caller must end this choice in the engine."""
        if self.prompt_only and delta.token_ids:
            delta = TokenDelta((), FinishReason.LENGTH, index=delta.index, num_cached=delta.num_cached)
        choice = self._choices[delta.index]
        delta, text, tokens = choice.take(delta)
        if delta.prompt_logprobs:
            self.prompt_logprobs.extend(delta.prompt_logprobs)
        self._num_cached += delta.num_cached
        return CompletionDelta(
            self.index,
            text,
            delta.token_ids,
            choice.reason,
            delta.logprobs,
            delta.index,
            delta.prompt_logprobs,
            delta.num_cached,
            tokens,
            choice.stop,
        )

    def take_list(
        self, arrived: Sequence[TokenDelta], end_choice: Callable[[str, int], None]
    ) -> list[CompletionDelta]:
        """Adds the deltas of unfinished choices. Once `is_over`, the caller must close the engine's stream.

        end_choice: called with request id and choice index when a stop string ends one choice while others continue.
        """
        taken = []
        for delta in arrived:
            if not self.wants(delta.index):
                continue
            new = self.take(delta)
            if new.finish_reason is not None and delta.finish_reason is None and not self.is_over:
                end_choice(self.request.request_id, delta.index)
            taken.append(new)
        return taken

    def completion(self) -> Completion:
        kept = self._choices
        if len(kept) > self._sampling.n:
            kept = sorted(kept, key=lambda choice: choice.logprob, reverse=True)[: self._sampling.n]
        choices = tuple(choice.finished(with_logprobs=self.lists_logprobs) for choice in kept)
        prompt_logprobs = self.prompt_logprobs if self._sampling.prompt_logprobs is not None else None
        return Completion(self.request.prompt_token_ids, choices, prompt_logprobs, self._num_cached)


class _ChoiceState:
    """The state of one choice. reason: why the choice ended; None while it is unfinished.

    hidden: special tokens that occur in stop strings, but that the text leaves out.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        stops: Sequence[StopString],
        options: AnswerOptions,
        hidden: frozenset[str],
    ) -> None:
        self.reason: FinishReason | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._tokens: list[AlignedToken] = []
        self._options = options
        self._includes_stop = sampling.include_stop_str_in_output
        self._detokenizer: Detokenizer | None = None
        self._aligner: TokenAligner | None = None
        if tokenizer is not None:
            skip, shown = sampling.skip_special_tokens, options.shown
            self._detokenizer = Detokenizer(
                tokenizer.start_decoding(skip_special_tokens=skip, shown=shown),
                stops,
                sampling.min_tokens,
                includes_stop=self._includes_stop,
                stop_decoder=tokenizer.start_decoding(shown=shown | hidden) if hidden else None,
                hidden=hidden,
            )
            if sampling.logprobs is not None:
                self._aligner = TokenAligner(tokenizer.start_measuring(skip_special_tokens=skip, shown=shown))

    @property
    def logprob(self) -> float:
        """The sum of the log-probabilities of all tokens."""
        return sum(entry.logprob for entry in self._logprobs)

    @property
    def stop(self) -> str | None:
        return None if self._detokenizer is None else self._detokenizer.stop

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def take(self, delta: TokenDelta) -> tuple[TokenDelta, str, tuple[AlignedToken, ...]]:
        """Adds a delta. Returns three values: the delta without the tokens after a stop string, the text that is now
        certain, and the tokens of this text if they are aligned.
        """
        assert self.reason is None, "a choice that is over spoke again"
        # The stop token is computed and counted, but by default it is not part of the text.
        is_cut = delta.finish_reason is FinishReason.STOP and not self._includes_stop
        num_shown = len(delta.token_ids) - is_cut
        text = ""
        if self._detokenizer is not None:
            text, num_pushed = self._detokenizer.push_until_stop(delta.token_ids[:num_shown])
            if num_pushed < num_shown:  # A stop string ended the answer within the delta.
                delta, num_shown = _shorten(delta, num_pushed), num_pushed
            if delta.finish_reason is not None:
                text += self._detokenizer.flush()
        self._token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self._logprobs.extend(delta.logprobs)
        self.reason = delta.finish_reason
        if self._detokenizer is None:
            return delta, "", ()
        if self._detokenizer.stopped:
            self.reason = FinishReason.STOP
        self._text.append(text)
        tokens: tuple[AlignedToken, ...] = ()
        if self._aligner is not None and delta.logprobs is not None:
            tokens = self._aligner.push(delta.token_ids[:num_shown], delta.logprobs[:num_shown], text)
        if self._aligner is not None and self.reason is not None:
            if not self._detokenizer.stopped:
                tokens += self._aligner.flush()
            elif self._options.return_token_ids:
                tokens += self._aligner.cut()
            if self._options.return_token_ids and delta.logprobs is not None:
                rest = zip(delta.token_ids[num_shown:], delta.logprobs[num_shown:], strict=True)
                tokens += tuple(AlignedToken(*token, 0) for token in rest)
        self._tokens.extend(tokens)
        return delta, text, tokens

    def finished(self, *, with_logprobs: bool) -> Choice:
        assert self.reason is not None, "a choice that goes on has no final answer yet"
        logprobs = self._logprobs if with_logprobs else None
        text = "".join(self._text)
        return Choice(text, self._token_ids, self.reason, logprobs, tuple(self._tokens), self.stop)


def _shorten(delta: TokenDelta, num_tokens: int) -> TokenDelta:
    """The delta up to the token with which a stop string ended the answer."""
    logprobs = None if delta.logprobs is None else delta.logprobs[:num_tokens]
    return replace(delta, token_ids=delta.token_ids[:num_tokens], logprobs=logprobs, finish_reason=None)


def _with_logprobs(sampling: SamplingParams) -> SamplingParams:
    """Requests logprobs if best_of needs them to rank the answers."""
    wanted = sampling.num_choices > sampling.n and sampling.logprobs is None
    return replace(sampling, logprobs=0) if wanted else sampling
