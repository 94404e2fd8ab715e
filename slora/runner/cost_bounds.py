"""Lower and upper bounds of each cost, derived from the model's FLOPs and bytes. No estimate may leave these bounds.

The bounds are not predictions. They exclude estimates that come from noise, such as a cost of zero for a decoding row.
The fastest machine assumed here is faster than any that runs this engine, and the slowest one is slower.
"""

from dataclasses import astuple, dataclass

from slora.core.cost_model import CostModel
from slora_kernels.layout import ModelShape
from slora_kernels.machine_limits import machine_limits

__all__ = ["CostBounds", "bound_costs"]

# FLOP/s of one core with matrix units, of one GPU, and of a machine whose cores are busy with other work.
_CORE_FLOPS, _GPU_FLOPS, _SLOWEST_FLOPS = 1e12, 2e16, 1e8
# Bytes/s of the fastest host memory, of the fastest GPU memory, and of the slowest memory.
_HOST_BANDWIDTH, _GPU_BANDWIDTH, _SLOWEST_BANDWIDTH = 2e12, 2e13, 1e8
# Seconds that the host itself needs for a step, a row and a token: the least, and the most on a busy machine.
_MIN_HOST_S = CostModel(
    step_s=1e-4, token_s=1e-7, decode_s=5e-6, context_token_s=1e-10, page_copy_s=1e-7, load_byte_s=1e-13
)
_MAX_HOST_S = CostModel(
    step_s=10.0, token_s=0.01, decode_s=0.1, context_token_s=1e-4, page_copy_s=0.1, load_byte_s=1e-7
)


@dataclass(frozen=True, slots=True)
class CostBounds:
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
    )
    most = CostModel(
        step_s=4 * weights / _SLOWEST_BANDWIDTH,
        token_s=flop / _SLOWEST_FLOPS,
        decode_s=flop / _SLOWEST_FLOPS,
        context_token_s=kv_bytes / _SLOWEST_BANDWIDTH,
        page_copy_s=full_page_bytes / _SLOWEST_BANDWIDTH,
        load_byte_s=1 / _SLOWEST_BANDWIDTH,
    )
    return CostBounds(_add(least, _MIN_HOST_S), _add(most, _MAX_HOST_S))


def _add(first: CostModel, second: CostModel) -> CostModel:
    return CostModel(*(a + b for a, b in zip(astuple(first), astuple(second), strict=True)))
