"""Compiles the grammars of requests, on the caller's thread or a separate one, and caches them for each tenant.

The library is loaded, and the vocabulary is read, when the first grammar is compiled or when the thread starts.
"""

import importlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from slora.core.errors import ConfigError, RequestRefused
from slora.core.sampling_params import (
    MAX_CACHED_FORMS,
    MAX_CACHED_FORMS_OF_TENANT,
    MISSING_LIBRARY,
    StructuredOutput,
)
from slora.core.tenant_cache import TenantCache
from slora.grammar.matcher import TokenSpelling

if TYPE_CHECKING:
    from slora.grammar.lark_grammar import GrammarLibrary, LarkGrammar

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    tenant: str
    output: StructuredOutput
    grammar: "LarkGrammar"


@dataclass(frozen=True, slots=True)
class Refused:
    tenant: str
    output: StructuredOutput
    error: RequestRefused


class GrammarCompiler:
    """Compiles and caches grammars. All methods are called from one thread, and none blocks for long.

    On the compiling thread, tenants take turns.

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
        # Guarded by the lock. Grammars are cached by kind and text of their form.
        self._cached = TenantCache[tuple[str, str], Compiled](MAX_CACHED_FORMS, MAX_CACHED_FORMS_OF_TENANT)
        self._done: deque[Compiled | Refused] = deque()
        self._in_flight: set[tuple[str, StructuredOutput]] = set()
        self._queued: dict[str, deque[StructuredOutput]] = {}  # The tenant whose turn is next comes first.
        self._thread = ThreadPoolExecutor(1, "grammars") if notify is not None else None
        if self._thread is not None:
            self._thread.submit(self._load)

    def request(self, tenant: str, output: StructuredOutput) -> None:
        """Starts to compile the grammar of a form. `poll` returns the result.

        If the form is already being compiled for the tenant, no second compilation starts. Then `poll` returns a single
        result for both calls.
        """
        with self._lock:
            if (tenant, output) in self._in_flight:
                return
            self._in_flight.add((tenant, output))
            known = self._cached.find(tenant, (output.kind, output.text))
            if known is not None:
                self._done.append(Compiled(tenant, output, known.grammar))
                return
            if self._thread is not None:
                self._queued.setdefault(tenant, deque()).append(output)
        if self._thread is not None:
            self._thread.submit(self._finish_next)
        else:
            self._finish(tenant, output)

    def poll(self) -> list[Compiled | Refused]:
        """Returns the results since the last call."""
        if not self._done:  # The common case needs no lock.
            return []
        with self._lock:
            results = list(self._done)
            self._done.clear()
            self._in_flight.difference_update((result.tenant, result.output) for result in results)
        return results

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _finish_next(self) -> None:
        with self._lock:
            tenant = next(iter(self._queued))
            outputs = self._queued.pop(tenant)
            output = outputs.popleft()
            if outputs:
                self._queued[tenant] = outputs
        self._finish(tenant, output)

    def _finish(self, tenant: str, output: StructuredOutput) -> None:
        result = self._compile(tenant, output)
        with self._lock:
            self._done.append(result)
            if isinstance(result, Compiled):
                self._cached.insert(tenant, (output.kind, output.text), result)
        if self._notify is not None:
            self._notify()

    def _compile(self, tenant: str, output: StructuredOutput) -> Compiled | Refused:
        try:
            if isinstance(self._library, ConfigError):
                unsupported = f"{output.param} is not supported: {self._library}"
                return Refused(tenant, output, RequestRefused(unsupported, output.param))
            return Compiled(tenant, output, self._library.compile(output))
        except RequestRefused as error:
            return Refused(tenant, output, error)
        except Exception as error:  # A bug must fail this request instead of ending the thread.
            _log.exception("compiling a grammar failed")
            return Refused(
                tenant, output, RequestRefused(f"{output.param} can't be compiled: {error}", output.param)
            )

    def _load(self) -> None:
        """Loads library and vocabulary before the first request needs them."""
        try:
            if isinstance(self._library, ConfigError):
                _log.info("structured output is not available: %s", self._library)
        except Exception:  # The first request for structured output fails with the same error.
            _log.exception("structured output is not available")

    @cached_property
    def _library(self) -> "GrammarLibrary | ConfigError":
        """The library with the vocabulary, or the error if it can't be loaded. The first access takes seconds."""
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
