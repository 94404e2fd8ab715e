"""How many replicas the load needs. Ray's controller calls `choose_num_replicas` with what the replicas report."""

import math
from typing import TYPE_CHECKING, Any

from slora.core.engine_state import EngineStats

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

PRESSURE = "slora_pressure"
# The load of a replica to which Ray scales.
TARGET_LOAD = 0.5


def measure_pressure(stats: EngineStats, max_num_seqs: int) -> float:
    """Returns the load of a replica, divided by the target, `TARGET_LOAD`.

    The load is the larger of two shares: the held pages of the pool, and the requests divided by the sequences of the
    largest batch.

    Worked example: 40% of the pages are held, 300 requests run or wait, and a batch has at most 256 sequences. The
    pressure is 300 / 256 / 0.5 = 2.34, so this load needs 2.34 times as many replicas.
    """
    requests = stats.running + stats.waiting + stats.awaiting_adapter
    load = max(stats.pages_held / stats.pages_total, requests / max_num_seqs)
    return load / TARGET_LOAD


def choose_num_replicas(context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
    """Returns the number of replicas at which each has the target load. Ray applies the bounds and the delays."""
    pressures = (context.aggregated_metrics or {}).get(PRESSURE, {})
    if not pressures:
        return context.target_num_replicas, {}
    mean = sum(pressures.values()) / len(pressures)
    # A replica that has just started has not reported yet. It counts with the mean of the others.
    return max(1, math.ceil(mean * context.current_num_replicas - 1e-6)), {}
