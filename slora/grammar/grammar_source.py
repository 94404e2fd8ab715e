"""How the scheduler gets compiled grammars: it requests a grammar, keeps running steps, and polls for the result.

Plain protocols and values. `grammar_compiler` implements them with the library llguidance.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

from slora.core.errors import RequestRefused
from slora.core.sampling_params import StructuredOutput
from slora_kernels.layout import Int32Array

__all__ = ["Compiled", "Grammar", "GrammarSource", "Matcher", "Refused"]


class Matcher(Protocol):
    """The state of one answer within its grammar: which tokens may come next."""

    @property
    def error(self) -> str | None:
        """The reason why no token can come next. None if some token can, or before the first call of `write_mask`."""

    def copy(self) -> "Matcher":
        """Returns an independent matcher in the same state."""

    def accept(self, token_id: int) -> None:
        """Appends a token to the answer. The last mask must have allowed it, and it must not be a stop token."""

    def write_mask(self, words: Int32Array) -> None:
        """Writes the mask of the next token into words int32 [ceil(vocab_size / 32)].

        Bit t % 32 of word t // 32 is 1 if token t is allowed. Stop tokens are allowed where the answer may end. If no
        token is allowed, all bits are 0 and `error` has the reason. Repeating the call has no effect.
        """


class Grammar(Protocol):
    """A compiled grammar, from which the matcher of each answer starts."""

    def start(self, stop_ids: Set[int]) -> Matcher:
        """Returns a matcher of an empty answer. stop_ids: the tokens that end the answer."""


@dataclass(frozen=True, slots=True)
class Compiled:
    tenant: str
    output: StructuredOutput
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Refused:
    tenant: str
    output: StructuredOutput
    error: RequestRefused


class GrammarSource(Protocol):
    """Compiles grammars. All methods are called from one thread, and none blocks for long."""

    def request(self, tenant: str, output: StructuredOutput) -> None:
        """Starts to compile the grammar of a form. `poll` returns the result.

        If the form is already being compiled for the tenant, no second compilation starts. Then `poll` returns a single
        result for both calls.
        """

    def poll(self) -> list[Compiled | Refused]:
        """Returns the results since the last call."""

    def close(self) -> None:
        """Ends the threads."""
