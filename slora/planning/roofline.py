"""Estimates the time of steps on a device that was never measured, from its data sheet (a roofline model).

A step reads the weights once and multiplies them with all of its tokens; the slower of these two counts. A step also
reads the KV of its decode rows and the distinct adapters of its tokens. Adapters are copied from the host while the
step computes.

Each part reaches only a share of the data sheet's figure. These shares were fitted to measurements of Llama-3.1-8B on
an H200 (bench/results/gpu-2026-11-22.json). So was the time that the host needs to plan and launch a step.
docs/performance.md compares predictions with these measurements.
"""

from dataclasses import dataclass

from slora.core.cost_model import StepWork
from slora.core.engine_config import EngineConfig
from slora.memory.pool_sizing import find_full_page_bytes
from slora.planning.devices import Device
from slora.planning.model_size import ModelSize
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import ModelShape

# Shares of the data sheet's bandwidth and FLOP/s that the engine reaches.
WEIGHT_READS = 0.72
QUANTIZED_READS = 0.6  # Not measured on a GPU yet.
KV_READS = 0.72
KV_FP8_READS = 0.35  # FP8 KV has half the bytes of 16-bit KV, but takes no less time to read.
ADAPTER_READS = 0.6
MATRIX_PRODUCTS = 0.38
HOST_COPIES = 0.75
EFFICIENCIES = {
    "weights": WEIGHT_READS,
    "quantized weights": QUANTIZED_READS,
    "KV": KV_READS,
    "KV in fp8": KV_FP8_READS,
    "adapters": ADAPTER_READS,
    "matrix products": MATRIX_PRODUCTS,
    "copies from the host": HOST_COPIES,
}
# Time of planning, sampling and launching a recorded step: a fixed part, and a part for each decode row.
_STEP_S, _ROW_S = 0.9e-3, 8e-6
# Time of shrink and expand at one site of one layer, without reading the adapters.
_LORA_SITE_S = 13e-6
# Time that the host needs to launch an unrecorded step, for each layer and for each site with adapters.
_LAUNCH_LAYER_S, _LAUNCH_SITE_S = 0.45e-3, 0.17e-3
# Steps with prompts are recorded if they have at most this many tokens (`slora/runner/step_graphs.py`).
RECORDED_TOKENS = 1536
# Time to start one sum over tensor-parallel ranks. An estimate: no group of GPUs was measured.
_SUM_S = 15e-6
# float32 matrix products do not use the fast matrix units.
_FLOAT32_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of the parts of a step."""

    weights_s: float  # Reading all weights.
    token_s: float  # The layers' matrix products and attention for one token.
    logits_s: float  # The matrix product for one row of logits.
    context_token_s: float  # Reading the KV of one token of context.
    lora_s: float  # Fixed time of shrink and expand in a step with adapters.
    adapter_byte_s: float  # Reading one byte of a distinct adapter.
    page_copy_s: float
    load_byte_s: float
    launch_s: float  # Launching an unrecorded step.
    lora_launch_s: float  # Launching its LoRA kernels.
    recorded_tokens: int = RECORDED_TOKENS  # Maximum number of tokens in a recorded step with prompts.
    # Starting the sums over tensor-parallel ranks in one step. Their bytes are part of `token_s`.
    sums_s: float = 0.0
    is_recorded: bool = True  # Whether decode steps are recorded.

    @staticmethod
    def of(
        device: Device,
        size: ModelSize,
        shape: ModelShape,
        config: EngineConfig,
        *,
        adapted: tuple[str, ...],
        prompt_tokens: float,
    ) -> "Roofline":
        """Computes the times of a device and a model.

        size, shape: those of one tensor-parallel rank's part.
        adapted: paths of the modules that adapters change. prompt_tokens: mean length of prompts, for attention.
        """
        full_page_bytes, num_ranks = find_full_page_bytes(shape, config), config.tensor_parallel_size
        flops = device.flops * MATRIX_PRODUCTS * (_FLOAT32_SHARE if shape.element_bytes > 2 else 1.0)
        # A token of a prompt attends to half of the prompt on average.
        attention = shape.attention_flop * prompt_tokens / 2
        reads = QUANTIZED_READS if size.is_quantized else WEIGHT_READS
        kv_reads = KV_FP8_READS if config.kv_format is KVFormat.FP8 else KV_READS
        sites = sum(
            any(shape.linears[m].path in adapted for m in shape.groups[group])
            for layer in range(shape.num_layers)
            for group in shape.layer_groups(layer)
        )
        copied = device.host_bandwidth * HOST_COPIES
        return Roofline(
            weights_s=size.step_bytes / (device.bandwidth * reads),
            token_s=(size.token_flop + attention) / flops + size.sent_bytes / device.sum_bandwidth,
            logits_s=size.head_flop / flops,
            context_token_s=full_page_bytes / config.block_tokens / (device.bandwidth * kv_reads),
            lora_s=sites * _LORA_SITE_S,
            adapter_byte_s=1 / (device.bandwidth * ADAPTER_READS),
            page_copy_s=full_page_bytes / copied,
            load_byte_s=1 / copied,
            launch_s=shape.num_layers * _LAUNCH_LAYER_S,
            lora_launch_s=sites * _LAUNCH_SITE_S,
            sums_s=size.num_exchanges * _SUM_S,
            # A tensor-parallel group does not record its steps (`slora/runner/runner.py`).
            recorded_tokens=RECORDED_TOKENS if num_ranks == 1 else 0,
            is_recorded=num_ranks == 1,
        )

    def step_seconds(self, work: StepWork, adapter_bytes: int) -> float:
        """Estimates the seconds of a step. adapter_bytes: packed size of the distinct adapters of its tokens."""
        num_tokens = work.prefill_tokens + work.decode_rows
        copies_s = work.loaded_bytes * self.load_byte_s
        if not num_tokens:
            return copies_s + work.swapped_pages * self.page_copy_s
        products_s = num_tokens * self.token_s + work.decode_rows * self.logits_s
        lora_s = self.lora_s + adapter_bytes * self.adapter_byte_s if adapter_bytes else 0.0
        device_s = max(self.weights_s, products_s) + work.context_tokens * self.context_token_s + lora_s
        device_s += self.sums_s
        if not self.is_recorded or (work.prefill_tokens and num_tokens > self.recorded_tokens):
            device_s = max(device_s, self.launch_s + (self.lora_launch_s if adapter_bytes else 0.0))
        step_s = _STEP_S + work.decode_rows * _ROW_S + device_s
        return max(step_s, copies_s) + work.swapped_pages * self.page_copy_s
