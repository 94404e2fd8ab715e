"""Measures the cost model at start: the seconds of a step, of a token and of a copied page on this machine.

The measurement runs real steps and copies on pages of the pool before any request uses them. No step is larger than the
trial step that ran before. Each cost is computed from differences of timings. If a difference is lost in noise, that
cost becomes nearly zero. The model itself is passed in as a function that runs a plan.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slora.core.cost_model import CostModel
from slora.core.request import EngineRequest
from slora.core.sampling_params import SamplingParams
from slora.memory.device_memory import DeviceMemory
from slora.memory.kv_cache import BlockTable
from slora.memory.tenant_account import TenantAccount
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk, StepPlan

_log = logging.getLogger(__name__)

_ROWS = 8
_CONTEXT_TOKENS = 512
# On a GPU, 256 tokens often take no longer than one, because launching the kernels takes most of the time.
_PREFILL_TOKENS = {"cpu": 256, "cuda": 2048}
# A measurement is repeated only until its runs have taken this many seconds. All measurements take about one second for
# a model with steps of 0.2 s.
_ENOUGH_S = 0.05
# A prefill that takes this many times as long as a step of one row measures the cost of a token well enough.
_ENOUGH_PREFILL = 2
_MAX_RUNS = 3
# Minimum number of runs of a timed copy. A copy is short, so an interruption by another program can make it a hundred
# times longer. A copy cost that is too high might never be corrected: the scheduler would never choose a swap, so no
# swap would be measured again.
_MIN_COPIES = 5
# Upper limit of the bytes in one timed copy. This many bytes do not fit into a CPU cache.
_COPY_BYTES = 32 << 20
_COPY_PAGES = 64
_MIN_S = 1e-9


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of single steps, each the shortest of a few runs."""

    one_row: float  # One decoding row.
    rows: float  # `num_rows` decoding rows.
    num_rows: int
    long_rows: float  # `num_rows` decoding rows with `context_tokens` tokens of context each.
    context_tokens: int
    prefill: float  # A prefill of `prefill_tokens` tokens.
    prefill_tokens: int
    # As in CostModel.
    page_copy_s: float
    load_byte_s: float

    def solve(self) -> CostModel:
        """Computes the costs from differences of the timings.

        Worked example: 10 ms for one row and 17 ms for 8 rows give 1 ms per row and 9 ms per step. Then 265 ms for 256
        tokens of prefill give 1 ms per token.
        """
        decode_s = (self.rows - self.one_row) / max(1, self.num_rows - 1)
        step_s = self.one_row - max(decode_s, _MIN_S)
        token_s = (self.prefill - step_s) / self.prefill_tokens
        # Other costs are converted into tokens, so noise must not make a token free. A token costs at least a tenth of
        # its share of the whole prefill step.
        token_s = max(token_s, 0.1 * self.prefill / self.prefill_tokens)
        context_tokens = self.num_rows * max(1, self.context_tokens - 1)
        return CostModel(
            step_s=max(step_s, _MIN_S),
            token_s=max(token_s, _MIN_S),
            decode_s=max(decode_s, _MIN_S),
            context_token_s=max((self.long_rows - self.rows) / context_tokens, _MIN_S),
            page_copy_s=max(self.page_copy_s, _MIN_S),
            load_byte_s=self.load_byte_s,
        )


def measure_costs(
    run: Callable[[StepPlan], object],
    memory: DeviceMemory,
    max_tokens: int,
    max_rows: int,
    max_model_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Measures all costs. Takes about a second, and far less where steps are short.

    No page may be in use yet: the measurement writes to many pages and leaves them zeroed.
    max_tokens, max_rows: maximum numbers of tokens and sequences in a step.
    """
    bench = _Bench(run, memory, max_tokens, max_rows, max_model_len, clock)
    try:
        costs = bench.measure().solve()
    finally:
        bench.clear()
    _log.info(
        "measured: a step %.3g ms, a token of prefill %.3g ms, a decoding sequence %.3g ms, 1000 "
        "tokens of its context %.3g ms, a page to the host or back %.3g ms, adapters into the pool "
        "%.3g GB/s",
        *(1e3 * seconds for seconds in (costs.step_s, costs.token_s, costs.decode_s)),
        1e6 * costs.context_token_s,
        1e3 * costs.page_copy_s,
        1e-9 / costs.load_byte_s,
    )
    return costs


class _Bench:
    """Runs the timed steps and copies on the scratch pages [0, num_scratch).

    Each row with a long context has pages of its own, if the pool is large enough.
    """

    def __init__(
        self,
        run: Callable[[StepPlan], object],
        memory: DeviceMemory,
        max_tokens: int,
        max_rows: int,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._clock = clock
        self._memory = memory
        self._num_rows = min(_ROWS, max_tokens, max_rows)
        self._context_tokens = min(_CONTEXT_TOKENS, max_model_len)
        self._prefill_tokens = min(_PREFILL_TOKENS[memory.device.type], max_tokens)
        self._block_tokens = memory.geometry.block_tokens
        num_blocks = -(-self._context_tokens // self._block_tokens)
        wanted = self._num_rows * (num_blocks + memory.num_state_pages)
        self._num_scratch = min(len(memory.pages), wanted, max(2, 4 * _COPY_BYTES // memory.full_page_bytes))
        # On a GPU, the first run of each kind of step compiles its kernels, and the second one may be recorded.
        self._fewest_runs = 1 if memory.device.type == "cpu" else 3
        self.clear()

    def clear(self) -> None:
        self._memory.pages[: self._num_scratch].zero_()

    def measure(self) -> Timings:
        one_row = self._time_decode(1, 1)
        prefill_tokens, prefill = self._time_prefill(_ENOUGH_PREFILL * one_row)
        load_byte_s = self._time_load()
        return Timings(
            one_row=one_row,
            rows=self._time_decode(self._num_rows, 1),
            num_rows=self._num_rows,
            long_rows=self._time_decode(self._num_rows, self._context_tokens),
            context_tokens=self._context_tokens,
            prefill=prefill,
            prefill_tokens=prefill_tokens,
            page_copy_s=self._time_page_copy(load_byte_s),
            load_byte_s=load_byte_s,
        )

    def _time_decode(self, num_rows: int, context_tokens: int) -> float:
        chunks = [self._chunk(row, context_tokens, 1, samples=True) for row in range(num_rows)]
        return self._time_step(chunks)

    def _time_prefill(self, enough_s: float) -> tuple[int, float]:
        """Doubles the prefill until it takes `enough_s` seconds or is as large as allowed.

        Returns (tokens, seconds).
        """
        num_tokens = min(16, self._prefill_tokens)
        seconds = self._time_step(self._prefill(num_tokens))
        while num_tokens < self._prefill_tokens and seconds < enough_s:
            num_tokens = min(2 * num_tokens, self._prefill_tokens)
            seconds = self._time_step(self._prefill(num_tokens))
        return num_tokens, seconds

    def _prefill(self, num_tokens: int) -> list[Chunk]:
        """A prefill of `num_tokens` tokens, cut into several sequences if one sequence may not be that long.

        Only one of the sequences samples a token. So this step samples as many tokens as a step of one decoding row.
        """
        longest = self._context_tokens
        lengths = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
        return [self._chunk(row, count, count, samples=row == 0) for row, count in enumerate(lengths)]

    def _chunk(self, row: int, context_tokens: int, num_tokens: int, *, samples: bool) -> Chunk:
        """A chunk with the last `num_tokens` tokens of a new sequence of `context_tokens` tokens."""
        request = EngineRequest("measured", "", [0] * context_tokens, (), SamplingParams())
        blocks = BlockTable(self._block_tokens, self._memory.num_state_pages)
        sequence = Sequence(request, TenantAccount("measured"), 1, frozenset(), 0, blocks)
        sequence.row = row
        num_blocks = sequence.blocks.pages_missing(context_tokens)
        sequence.blocks.extend([(row * num_blocks + n) % self._num_scratch for n in range(num_blocks)])
        start = context_tokens - num_tokens
        return Chunk(sequence, start, num_tokens, samples=samples, slots=())

    def _time_step(self, chunks: list[Chunk]) -> float:
        # A row of the sampling table is written once per sequence, so that write is not part of the step's time.
        self._run(StepPlan(rows_to_write=[chunk.sequence for chunk in chunks if chunk.samples]))
        return self._time(lambda: self._run(StepPlan(chunks=chunks)), self._fewest_runs)

    def _time_load(self) -> float:
        """Returns the seconds that one byte of an adapter takes from the host to the pool."""
        pages = list(range(self._num_copied(self._num_scratch)))
        # The host cache is page-locked for a GPU.
        is_page_locked = self._memory.device.type == "cuda"
        num_bytes = len(pages) * self._memory.full_page_bytes
        content = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_page_locked)
        return self._time(lambda: self._memory.write(pages, content), _MIN_COPIES) / len(content)

    def _time_page_copy(self, load_byte_s: float) -> float:
        """Returns the seconds to copy one page to the host or back. Without host pages, returns the seconds to load one
        page of an adapter.
        """
        num_pages = self._num_copied(min(self._num_scratch, len(self._memory.host_pages)))
        if num_pages == 0:
            return load_byte_s * self._memory.full_page_bytes
        pairs = [(page, page) for page in range(num_pages)]

        def swap() -> None:
            self._memory.swap_out(pairs)
            self._memory.swap_in(pairs)

        return self._time(swap, _MIN_COPIES) / (2 * num_pages)

    def _num_copied(self, num_pages: int) -> int:
        return min(num_pages, _COPY_PAGES, max(1, _COPY_BYTES // self._memory.full_page_bytes))

    def _time(self, work: Callable[[], object], fewest_runs: int) -> float:
        """Returns the seconds of the shortest of a few runs."""
        shortest, spent, runs = float("inf"), 0.0, 0
        while runs < fewest_runs or (runs < _MAX_RUNS and spent < _ENOUGH_S):
            began = self._clock()
            work()
            if self._memory.device.type == "cuda":
                torch.cuda.synchronize(self._memory.device)
            seconds = self._clock() - began
            shortest, spent, runs = min(shortest, seconds), spent + seconds, runs + 1
        return max(shortest, _MIN_S)
