"""Compiles the grammars of requests, on a thread of its own if asked to, and caches them.

The library is loaded, and the vocabulary is read, when the first grammar is compiled or when the thread starts.
"""

import importlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from slora.errors import ConfigError, RequestRefused
from slora.grammar.grammar_source import Compiled, Refused
from slora.grammar.token_spelling import TokenSpelling
from slora.structured_output import MAX_CACHED_FORMS, MISSING_LIBRARY, StructuredOutput

if TYPE_CHECKING:
    from slora.grammar.lark_grammar import GrammarLibrary

__all__ = ["GrammarCompiler"]

_log = logging.getLogger(__name__)


class GrammarCompiler:
    """See `GrammarSource`.

    read_spelling: reads the vocabulary. Raises ConfigError if its tokens do not spell bytes.
    notify: called on the compiling thread after each compilation. None: `request` compiles on the caller's thread.
    """

    def __init__(
        self,
        read_spelling: Callable[[], TokenSpelling],
        eos_token_ids: Sequence[int],
        notify: Callable[[], None] | None = None,
    ) -> None:
        self._read_spelling = read_spelling
        self._eos_token_ids = eos_token_ids
        self._notify = notify
        self._lock = Lock()
        # Guarded by the lock. The least recently used grammar is first.
        self._cached: OrderedDict[tuple[str, str], Compiled] = OrderedDict()
        self._done: deque[Compiled | Refused] = deque()
        self._in_flight: set[StructuredOutput] = set()
        self._thread = ThreadPoolExecutor(1, "grammars") if notify is not None else None
        if self._thread is not None:
            self._thread.submit(self._load)

    def request(self, output: StructuredOutput) -> None:
        with self._lock:
            if output in self._in_flight:
                return
            self._in_flight.add(output)
            known = self._cached.get((output.kind, output.text))
            if known is not None:
                self._cached.move_to_end((output.kind, output.text))
                self._done.append(Compiled(output, known.grammar))
        if known is not None:
            return
        if self._thread is not None:
            self._thread.submit(self._finish, output)
        else:
            self._finish(output)

    def poll(self) -> list[Compiled | Refused]:
        if not self._done:  # the common case: needs no lock
            return []
        with self._lock:
            results = list(self._done)
            self._done.clear()
            self._in_flight.difference_update(result.output for result in results)
        return results

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _finish(self, output: StructuredOutput) -> None:
        result = self._compile(output)
        with self._lock:
            self._done.append(result)
            if isinstance(result, Compiled):
                self._cached[output.kind, output.text] = result
                if len(self._cached) > MAX_CACHED_FORMS:
                    self._cached.popitem(last=False)
        if self._notify is not None:
            self._notify()

    def _compile(self, output: StructuredOutput) -> Compiled | Refused:
        try:
            if isinstance(self._library, ConfigError):
                unsupported = f"{output.param} is not supported: {self._library}"
                return Refused(output, RequestRefused(unsupported, output.param))
            return Compiled(output, self._library.compile(output))
        except RequestRefused as error:
            return Refused(output, error)
        except Exception as error:  # top of a thread: a bug must fail this request, not block it
            _log.exception("compiling a grammar failed")
            return Refused(output, RequestRefused(f"{output.param} can't be compiled: {error}", output.param))

    def _load(self) -> None:
        """Loads library and vocabulary before the first request needs them."""
        try:
            if isinstance(self._library, ConfigError):
                _log.info("structured output is not available: %s", self._library)
        except Exception:  # top of a thread: the first request fails with the same error
            _log.exception("structured output is not available")

    @cached_property
    def _library(self) -> "GrammarLibrary | ConfigError":
        """The library with the vocabulary, or why this model can't have it. Reading it takes seconds."""
        try:
            return self._open_library()
        except ConfigError as error:
            return error

    def _open_library(self) -> "GrammarLibrary":
        try:
            module = importlib.import_module("slora.grammar.lark_grammar")
        except ModuleNotFoundError as error:
            raise ConfigError(MISSING_LIBRARY) from error
        if not self._eos_token_ids:
            raise ConfigError("the model has no end-of-sequence token, so a grammar could not end an answer")
        library: GrammarLibrary = module.GrammarLibrary(self._read_spelling(), self._eos_token_ids)
        return library
