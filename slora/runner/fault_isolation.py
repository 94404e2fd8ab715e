"""Recovers from a step that failed: finds the chunks that cause the failure and computes the others.

Failures are handled in this order:

    a step of the base model also fails    the device is lost: DeviceFailed ends the engine
    pages could not be moved               PageTransferFailed: the scheduler undoes the step
    the computation failed                 the chunks are computed again in halves; a half that fails is split again,
                                           until a chunk fails alone (bisection)

Computing a chunk again is safe for KV: it writes the same each time, and only to pages of its own sequence. But a
recurrent state advances each time, so the engine then drops the results and restarts the sequences. Requests and the
scheduler are outside this module.
"""

import logging
from dataclasses import dataclass, field

from slora.runner.runner import PageTransferFailed, Runner
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk, SampledToken, StepPlan

_log = logging.getLogger(__name__)

# One culprit among 256 chunks is found in 16 runs. More runs than this limit would delay all other requests too long.
_MAX_RUNS = 64


@dataclass(slots=True)
class StepResult:
    """The outcome of a step."""

    # One token per sequence in the `sampled_sequences` of the chunks that were computed, in order.
    sampled: list[SampledToken] = field(default_factory=list)
    culprits: list[Chunk] = field(default_factory=list)  # Chunks that fail when they are computed alone.
    # Chunks that were not isolated within the limit of runs.
    given_up: list[Chunk] = field(default_factory=list)


class FaultIsolation:
    """Isolates the chunks that make a step fail. most_runs: the most additional runs for one failed step."""

    def __init__(self, runner: Runner, most_runs: int = _MAX_RUNS) -> None:
        self._runner = runner
        self._most_runs = most_runs

    def recover(self, plan: StepPlan, error: Exception) -> StepResult:
        """Computes a failed step in smaller groups of chunks. No other step is running.

        error: with which the step failed. Raises PageTransferFailed or DeviceFailed.
        """
        _log.error("a step of %d chunks failed", len(plan.chunks), exc_info=error)
        self._runner.probe()
        if isinstance(error, PageTransferFailed):
            raise error
        if not plan.chunks:
            raise PageTransferFailed("a step that only copies pages failed") from error
        return self._bisect(plan.chunks, plan.rows_to_write)

    def _bisect(self, chunks: list[Chunk], admitted: list[Sequence]) -> StepResult:
        result = StepResult()
        computed: dict[int, list[SampledToken]] = {}
        groups = [range(len(chunks))] if len(chunks) == 1 else _halve(range(len(chunks)))
        num_left = self._most_runs
        while groups:
            group = groups.pop()
            if not num_left:
                result.given_up.extend(chunks[at] for at in group)
                continue
            num_left -= 1
            sampled = self._try([chunks[at] for at in group], admitted)
            if sampled is not None:
                tokens = iter(sampled)
                computed |= {at: [next(tokens) for _ in chunks[at].sampled_sequences] for at in group}
            elif len(group) == 1:
                result.culprits.append(chunks[group[0]])
            else:
                groups += _halve(group)
        result.sampled = [token for at in sorted(computed) for token in computed[at]]
        _log.error(
            "a step of %d chunks failed; computed in smaller groups, %d chunks succeeded, %d failed even by "
            "themselves, and %d were given up because the limit of runs was reached",
            len(chunks), len(computed), len(result.culprits), len(result.given_up),
        )  # fmt: skip
        return result

    def _try(self, chunks: list[Chunk], admitted: list[Sequence]) -> list[SampledToken] | None:
        """Computes some chunks of the failed step again. Returns None if this run also fails.

        admitted: sequences whose rows of the sampling table the step was to write.
        """
        # The failed run may not have written the rows of the sampling table, or may have counted tokens in them that
        # are lost. So this run writes the rows again.
        sampling = [
            sequence for chunk in chunks if chunk.samples for sequence in (chunk.sequence, *chunk.forks)
        ]
        try:
            return self._runner.run(StepPlan(chunks=chunks, rows_to_write=[*admitted, *sampling]))
        except Exception as error:
            _log.warning(
                "%d chunks of the failed step fail again: %s: %s", len(chunks), type(error).__name__, error
            )
            self._runner.probe()
            return None


def _halve(group: range) -> list[range]:
    """Returns both halves, the second one first, because the last element of the list is popped next."""
    middle = len(group) // 2
    return [group[middle:], group[:middle]]
