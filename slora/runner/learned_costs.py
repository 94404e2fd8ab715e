"""Learns the cost model from the engine's steps.

On a busy machine, the measurements at start are wrong. Learning from each step corrects them within a minute.

Computing, swapping and loading are timed separately, because a copy of microseconds would be lost in the noise of
computing. The learner keeps the latest timings of each kind of step, such as decode steps of 8 to 15 rows. Once a
second it fits the costs to these timings by median regression of a linear model:

    minimize the sum over timings of  weight * |measured - predicted| / predicted,  least <= cost <= most

The median makes the fit robust: on a busy machine, the same step took from 2 to 500 ms (median 33 ms). The weight of a
timing halves every 30 seconds, so the costs follow the machine within a minute.

Timings of several kinds are needed to separate the costs. For example, the cost of a step and the cost of a row can't
be separated while the batch stays the same. A cost that no step uses keeps its estimate. A decoding row costs at least
as much as a token of prefill, because it does all of that work. Without this rule the fit could shift time between the
cost of a row and the cost of its context.

The same steps and times give the same costs. Clocks and tensors are outside this module.
"""

from collections import OrderedDict, deque
from dataclasses import astuple, dataclass, fields, replace
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slora.core.cost_model import CostModel, StepTimes, StepWork
from slora_kernels.layout import ModelShape
from slora_kernels.machine_limits import machine_limits

# FLOP/s of one core with matrix units, of one GPU, and of a machine whose cores are busy with other work.
_CORE_FLOPS, _GPU_FLOPS, _SLOWEST_FLOPS = 1e12, 2e16, 1e8
# Bytes/s of the fastest host memory, of the fastest GPU memory, and of the slowest memory.
_HOST_BANDWIDTH, _GPU_BANDWIDTH, _SLOWEST_BANDWIDTH = 2e12, 2e13, 1e8
# Seconds that the host itself needs for a step, a row and a token: the least, and the most on a busy machine.
_MIN_HOST_S = CostModel(
    step_s=1e-4,
    token_s=1e-7,
    decode_s=5e-6,
    context_token_s=1e-10,
    page_copy_s=1e-7,
    load_byte_s=1e-13,
    prefill_context_s=1e-13,
)
_MAX_HOST_S = CostModel(
    step_s=10.0,
    token_s=0.01,
    decode_s=0.1,
    context_token_s=1e-4,
    page_copy_s=0.1,
    load_byte_s=1e-7,
    prefill_context_s=1e-5,
)


@dataclass(frozen=True, slots=True)
class CostBounds:
    """Lower and upper bounds of each cost, derived from the model's FLOPs and bytes. No estimate may leave these
    bounds.

    The bounds are not predictions. They exclude estimates that come from noise, such as a cost of zero for a decoding
    row. The fastest machine assumed here is faster than any that runs this engine, and the slowest one is slower.
    """

    lower: CostModel
    upper: CostModel

    def clamp(self, costs: CostModel) -> CostModel:
        triples = zip(astuple(self.lower), astuple(costs), astuple(self.upper), strict=True)
        return CostModel(*(min(max(low, value), high) for low, value, high in triples))


def bound_costs(shape: ModelShape, full_page_bytes: int, block_tokens: int, *, on_gpu: bool) -> CostBounds:
    """Returns the bounds for one model on this machine.

    Worked example: 1e9 weights in the layers need 2e9 FLOP per token. On 8 cores that takes from 0.25 ms to 20 s.
    """
    weights = shape.num_weights
    flop = 2 * weights
    fastest = _GPU_FLOPS if on_gpu else _CORE_FLOPS * machine_limits().num_threads
    bandwidth = _GPU_BANDWIDTH if on_gpu else _HOST_BANDWIDTH
    kv_bytes = full_page_bytes / block_tokens
    least = CostModel(
        step_s=weights / bandwidth,  # A step reads at least one byte per weight.
        token_s=flop / fastest,
        decode_s=flop / fastest,
        context_token_s=kv_bytes / bandwidth,
        page_copy_s=full_page_bytes / bandwidth,
        load_byte_s=1 / bandwidth,
        prefill_context_s=shape.attention_flop / fastest,
    )
    most = CostModel(
        step_s=4 * weights / _SLOWEST_BANDWIDTH,
        token_s=flop / _SLOWEST_FLOPS,
        decode_s=flop / _SLOWEST_FLOPS,
        context_token_s=kv_bytes / _SLOWEST_BANDWIDTH,
        page_copy_s=full_page_bytes / _SLOWEST_BANDWIDTH,
        load_byte_s=1 / _SLOWEST_BANDWIDTH,
        prefill_context_s=shape.attention_flop / _SLOWEST_FLOPS,
    )
    return CostBounds(_add(least, _MIN_HOST_S), _add(most, _MAX_HOST_S))


def _add(first: CostModel, second: CostModel) -> CostModel:
    return CostModel(*(a + b for a, b in zip(astuple(first), astuple(second), strict=True)))


_TIMINGS_PER_KIND = 16
_MAX_KINDS = 64
_HALF_LIFE_S = 30.0
_FIT_EVERY_S = 1.0
# Positions of token_s and decode_s among the fields of CostModel.
_TOKEN, _DECODE = 1, 2
# Timings are at least this long. The value is less than the resolution of any clock.
_MIN_S = 1e-9
# Median regression is computed as a few weighted least-squares fits. Each of them is solved by coordinate descent over
# the seven costs. A fit starts at the previous estimate, so a few rounds are enough.
_NUM_REWEIGHTINGS = 3
_NUM_SWEEPS = 30
# All relative errors below this value count as this value. Otherwise a timing that fits exactly would get an infinite
# weight.
_EXACT_ENOUGH = 0.1
# Weight of the previous estimate of a cost, relative to the timings of steps that incurred the cost. Where the timings
# cannot separate two costs, their estimates stay close to the previous ones.
_DAMPING = 0.01

Matrix = npt.NDArray[np.float64]


class _Timing(NamedTuple):
    """How long one step took for computing, for swapping or for loading."""

    units: tuple[int, ...]  # How often each cost occurred, in the order of CostModel.
    seconds: float  # Their total time.
    at_s: float  # Time of the timing.


class LearnedCosts:
    """Changes a cost model as steps run. current: this model, with the latest estimate.

    start: the first estimate, measured before there were requests.
    """

    def __init__(self, start: CostModel, bounds: CostBounds) -> None:
        start = replace(start, decode_s=max(start.decode_s, start.token_s))
        self.current = bounds.clamp(start)
        self._bounds = bounds
        # The timings of each kind of step. The kind with the latest timing is last.
        self._timings: OrderedDict[tuple[int, ...], deque[_Timing]] = OrderedDict()
        self._fitted_at_s = -np.inf

    @property
    def num_timings(self) -> int:
        return sum(map(len, self._timings.values()))

    def count(self, work: StepWork, times: StepTimes, now: float) -> None:
        """Adds the timing of one step. now: seconds of any monotonic clock."""
        if work.prefill_tokens or work.decode_rows:
            units = (
                1,
                work.prefill_tokens,
                work.decode_rows,
                work.context_tokens,
                0,
                0,
                work.prefill_context,
            )
            self._keep(_Timing(units, times.compute_s, now))
        if work.swapped_pages:
            self._keep(_Timing((0, 0, 0, 0, work.swapped_pages, 0, 0), times.swap_s, now))
        if work.loaded_bytes:
            self._keep(_Timing((0, 0, 0, 0, 0, work.loaded_bytes, 0), times.load_s, now))
        if self._timings and now - self._fitted_at_s >= _FIT_EVERY_S:
            self._fitted_at_s = now
            self._fit(now)

    def _keep(self, timing: _Timing) -> None:
        kind = tuple(number.bit_length() for number in timing.units)
        timings = self._timings.setdefault(kind, deque(maxlen=_TIMINGS_PER_KIND))
        timings.append(timing._replace(seconds=max(timing.seconds, _MIN_S)))
        self._timings.move_to_end(kind)
        if len(self._timings) > _MAX_KINDS:
            self._timings.popitem(last=False)

    def _fit(self, now: float) -> None:
        timings = [timing for kind in self._timings.values() for timing in kind]
        units: Matrix = np.array([timing.units for timing in timings], np.float64)  # [timings, costs]
        seconds: Matrix = np.array([timing.seconds for timing in timings])
        recency: Matrix = np.exp2([(timing.at_s - now) / _HALF_LIFE_S for timing in timings])
        costs = list(astuple(self.current))
        for _ in range(_NUM_REWEIGHTINGS):
            predicted = units @ costs
            errors = np.maximum(np.abs(seconds / predicted - 1), _EXACT_ENOUGH)
            weighted = units.T * (recency / (predicted * predicted * errors))
            costs = self._descend((weighted @ units).tolist(), (weighted @ seconds).tolist(), costs)
        for field, cost in zip(fields(self.current), costs, strict=True):
            setattr(self.current, field.name, cost)

    def _descend(self, products: list[list[float]], sums: list[float], costs: list[float]) -> list[float]:
        """Runs coordinate descent from `costs`, within the bounds. products [7, 7], sums [7]: the normal equations.

        Plain Python is ten times as fast as numpy for matrices this small.
        """
        current = astuple(self.current)
        least, most = astuple(self._bounds.lower), astuple(self._bounds.upper)
        costs = costs.copy()
        for _ in range(_NUM_SWEEPS):
            for at, row in enumerate(products):
                own = row[at]
                if not own:  # None of the timed steps incurred this cost.
                    continue
                others = sum(map(mul, row, costs)) - own * costs[at]
                wanted = (sums[at] - others + _DAMPING * own * current[at]) / (own * (1 + _DAMPING))
                low = max(least[at], costs[_TOKEN]) if at == _DECODE else least[at]
                costs[at] = min(max(wanted, low), most[at])
        return costs
