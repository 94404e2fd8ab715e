"""The sequences that wait until their grammar is compiled."""

from collections.abc import Iterator

from slora.core.errors import RequestRefused
from slora.core.structured_output import StructuredOutput
from slora.grammar.grammar_source import GrammarSource, Refused
from slora.scheduler.sequence import Sequence


class GrammarWaiting:
    def __init__(self, grammars: GrammarSource | None) -> None:
        self._grammars = grammars
        self._waiters: dict[tuple[str, StructuredOutput], list[Sequence]] = {}

    def add(self, sequence: Sequence) -> None:
        """Requests the grammar of a sequence, which then waits until `collect` yields it."""
        tenant, output = sequence.tenant.name, sequence.request.sampling.structured_output
        assert self._grammars is not None and output is not None, "nothing compiles grammars here"
        self._waiters.setdefault((tenant, output), []).append(sequence)
        self._grammars.request(tenant, output)

    def remove(self, sequence: Sequence) -> None:
        """Ends the wait of a sequence. Its grammar is still compiled, because the next request may use it."""
        tenant, output = sequence.tenant.name, sequence.request.sampling.structured_output
        if output is not None and sequence in self._waiters.get((tenant, output), ()):
            self._waiters[tenant, output].remove(sequence)

    def collect(self) -> Iterator[tuple[Sequence, RequestRefused | None]]:
        """Yields each sequence whose grammar was compiled or refused, with the error if it was refused.

        A sequence whose grammar was compiled now has its matcher.
        """
        for result in () if self._grammars is None else self._grammars.poll():
            for sequence in self._waiters.pop((result.tenant, result.output), []):
                if isinstance(result, Refused):
                    yield sequence, result.error
                else:
                    sequence.start_matcher(result.grammar.start(sequence.stop_ids))
                    yield sequence, None
