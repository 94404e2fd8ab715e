"""Forks, drops and finishes the sequences of a beam search when all of its beams have proposed.

In each step a beam proposes its continuations and waits for the other beams: they may be computed in a later step or be
preempted. When all beams have proposed, the best continuations are kept. The first continuation of a beam keeps the
beam's sequence and blocks. Further continuations become forks that share these blocks. A beam without a continuation
releases its pages at once. The search keeps finished hypotheses as tokens, not as sequences.

A preempted beam withdraws its proposal. So every beam that has proposed is running, and forks can share the KV of this
beam.
"""

from dataclasses import replace

from slora.core.errors import RequestRefused
from slora.core.request import StepOutput, TokenDelta
from slora.scheduler.beam_search import BeamSearch, Proposal
from slora.scheduler.charges import charge_output
from slora.scheduler.lifecycle import Lifecycle
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan


class Beams:
    """Applies the decisions of `BeamSearch` to the sequences. It decides nothing itself."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._forks: list[Sequence] = []  # The forks that were created after the last step.

    def start_forks(self, plan: StepPlan) -> None:
        """Adds the forks that were created after the last step to `plan.rows_to_write`."""
        plan.rows_to_write.extend(fork for fork in self._forks if fork.is_running)
        self._forks = []

    def propose(self, sequence: Sequence, search: BeamSearch, proposal: Proposal) -> list[StepOutput]:
        """Records the proposal of one beam. Returns the answers if the search is now over, otherwise an empty list."""
        search.propose(sequence.index, proposal)
        if not search.is_ready:
            return []
        beams = {beam.index: beam for beam in self._lifecycle.unfinished.find(sequence.request.request_id)}
        for beam in beams.values():
            charge_output(beam, 1)
        next_beams = search.advance(min(beam.max_tokens for beam in beams.values()))
        if next_beams is None:
            return self._finish(beams, search)
        for index in next_beams.dropped:
            self._lifecycle.finish(beams[index])
        # A grammar may allow fewer continuations than the width of the search. The unused places stay reserved.
        num_spare = search.width - len(next_beams.kept) - len(next_beams.forks)
        for index in next_beams.kept:
            beams[index].num_choices = 1
            self._lifecycle.batch.resize(beams[index], 1)
        for parent, index, token_id in next_beams.forks:
            self._fork(beams[parent], index, token_id)
        for index, token_id in next_beams.kept.items():
            beams[index].append(token_id)
        first = beams[next(iter(next_beams.kept))]
        first.num_choices += num_spare
        batch = self._lifecycle.batch
        batch.resize(first, first.num_places + min(num_spare, batch.free_capacity))
        return self._lifecycle.pop_refused()

    def _fork(self, parent: Sequence, index: int, token_id: int) -> None:
        if parent.is_finished:  # Another fork could not be queued.
            return
        fork = parent.fork(index)
        fork.append(token_id)
        if not self._lifecycle.batch.free_capacity:
            self._lifecycle.queue_fork(fork, parent)
            return
        self._lifecycle.batch.assign_row(fork)
        self._lifecycle.add_fork(fork, parent)
        self._forks.append(fork)

    def _finish(self, beams: dict[int, Sequence], search: BeamSearch) -> list[StepOutput]:
        first, *_ = beams.values()
        num_wanted = first.request.sampling.num_choices
        best = search.best(num_wanted)
        if len(best) < num_wanted:  # A grammar may allow fewer answers than the request wants.
            return [self._lifecycle.fail(first, _too_few(len(best), num_wanted))]
        for beam in beams.values():
            self._lifecycle.finish(beam)
        deltas = [
            TokenDelta(answer.token_ids, answer.finish_reason, answer.logprobs, index)
            for index, answer in enumerate(best)
        ]
        deltas[0] = replace(deltas[0], num_cached=first.num_cached)
        return [StepOutput(first.request.request_id, delta) for delta in deltas]


def _too_few(num_found: int, num_wanted: int) -> RequestRefused:
    return RequestRefused(
        f"n is {num_wanted}, but the beam search found only {num_found} answers of the required form; lower n",
        "n",
    )
