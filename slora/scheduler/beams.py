"""The beams of a search as sequences: what becomes of them when all have proposed.

A beam proposes in each step what may come next, and waits for the others: for those that this step computes no more of,
and for those that gave way. Then the best continuations go on: the first one of a beam in its own sequence and blocks,
further ones in forks that share these blocks, and a beam that nothing continues gives its pages back at once. What has
ended is kept by the search as tokens, not as a sequence.

A beam that gives way takes its proposal back, so whoever has proposed runs, and its KV is there to be shared.
"""

from dataclasses import replace

from slora.request import StepOutput, TokenDelta
from slora.scheduler.beam_search import BeamSearch, Proposal
from slora.scheduler.charges import Charges
from slora.scheduler.lifecycle import Lifecycle
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan


class Beams:
    """Decides nothing: who survives is the search's choice."""

    def __init__(self, lifecycle: Lifecycle, charges: Charges) -> None:
        self._lifecycle = lifecycle
        self._charges = charges
        self._forks: list[Sequence] = []  # since the last step

    def start_forks(self, plan: StepPlan) -> None:
        """Those that came after the last step run from this one on."""
        plan.started.extend(fork for fork in self._forks if fork.is_running)
        self._forks = []

    def propose(self, sequence: Sequence, search: BeamSearch, proposal: Proposal) -> list[StepOutput]:
        """One beam of `search` was computed. Returns the answers if that was all that was missing to the end."""
        search.propose(sequence.index, proposal)
        if not search.is_ready:
            return []
        beams = {one.index: one for one in self._lifecycle.unfinished.find(sequence.request.request_id)}
        for beam in beams.values():
            self._charges.output(beam)
        survivors = search.advance(min(beam.max_tokens for beam in beams.values()))
        if survivors is None:
            return self._finish(beams, search)
        for index in survivors.dropped:
            self._lifecycle.retire(beams[index])
        for parent, index, token_id in survivors.forks:
            self._fork(beams[parent], index, token_id)
        for index, token_id in survivors.kept.items():
            beams[index].token_ids.append(token_id)
        return []

    def _fork(self, parent: Sequence, index: int, token_id: int) -> None:
        parent.num_choices = 1  # as many as there is room for run from here on
        fork = parent.fork(index)
        fork.token_ids.append(token_id)
        self._lifecycle.batch.seat(fork)
        self._lifecycle.join(fork, parent)
        self._forks.append(fork)

    def _finish(self, beams: dict[int, Sequence], search: BeamSearch) -> list[StepOutput]:
        for beam in beams.values():
            self._lifecycle.retire(beam)
        first, *_ = beams.values()
        best = search.best(first.request.sampling.num_choices)
        deltas = [
            TokenDelta(one.token_ids, one.finish_reason, one.logprobs, index)
            for index, one in enumerate(best)
        ]
        deltas[0] = replace(deltas[0], num_cached=first.num_cached)
        return [StepOutput(first.request.request_id, delta) for delta in deltas]
