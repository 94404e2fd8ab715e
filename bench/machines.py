"""The machines that are simulated: a model on a device, and what its work takes there.

The two GPUs are the class of machine that S-LoRA measured on, with Llama-7B in 16 bits. What hardware bounds is
arithmetic from data sheets; what S-LoRA's software cost on top is put into `decode_s`, so that at saturation the
simulated machine serves as many requests a second as S-LoRA's raw results say. They are for comparing policies with
each other, not for predicting a machine.
"""

from bench.simulation.machine import Machine
from slora.core.cost_model import CostModel
from slora_kernels.layout import llama_shape

LLAMA_7B = llama_shape(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=11008,
    vocab_size=32000,
    element_bytes=2,
)
# S-LoRA adapts these four: rank 64 takes 128 MiB, the KV of 256 tokens at 0.5 MiB each.
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
ALL_LINEARS = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

# A10G: 600 GB/s, 70 TFLOPS in 16 bits, PCIe 4 x8 of 12 GB/s; 6.74e9 parameters are 13.5 GB.
#   step_s           13.5 GB / 600 GB/s                                                       = 22.5 ms
#   token_s          2 * 6.74e9 FLOP / (70e12 * 0.6)                                          = 0.32 ms
#   context_token_s  0.5 MiB / 600 GB/s                                                       = 0.87 us
#   page_copy_s      8 MiB / 12 GB/s                                                          = 0.70 ms
#   decode_s: S-LoRA, S2, n = 200, R = 2: 1.58 requests/s of 262 + 263 tokens, from a pool of 14,500 tokens. Prefill
#     takes 1.58 * 262 * 0.32 ms = 0.13 of each second. 14,500 tokens hold about 28 requests (393 tokens and an adapter
#     of 120 each), so 415 tokens/s are 14.8 steps/s, 59 ms a step. Less 22.5 ms of weights and 28 * 393 * 0.87 us =
#     9.6 ms of attention, 27 ms are left for 28 rows                                        = 0.95 ms
A10G_7B = Machine(
    name="Llama-7B on A10G",
    shape=LLAMA_7B,
    adapted=ATTENTION,
    pool_tokens=14_500,
    costs=CostModel(
        step_s=22.5e-3,
        token_s=0.32e-3,
        decode_s=0.95e-3,
        context_token_s=0.87e-6,
        page_copy_s=0.70e-3,
        load_byte_s=1 / 12e9,
    ),
)

# A100-80: 2.0 TB/s, 312 TFLOPS, PCIe 4 x16 of 24 GB/s.
#   step_s 13.5 GB / 2.0 TB/s = 6.7 ms; token_s 13.5e9 FLOP / (312e12 * 0.55) = 0.079 ms; context_token_s 0.26 us;
#   page_copy_s 8 MiB / 24 GB/s = 0.35 ms
#   decode_s: S-LoRA, S2, n = 200, R = 10: 7.52 requests/s. Prefill 0.16 of each second. 125,000 tokens hold about 245
#     requests, so 1,978 tokens/s are 8.1 steps/s; 0.84 s / 8.1 = 104 ms a step, less 6.7 ms and 245 * 393 * 0.26 us =
#     25 ms: 72 ms for 245 rows                                                              = 0.29 ms
A100_7B = Machine(
    name="Llama-7B on A100-80",
    shape=LLAMA_7B,
    adapted=ATTENTION,
    pool_tokens=125_000,
    costs=CostModel(
        step_s=6.7e-3,
        token_s=0.079e-3,
        decode_s=0.29e-3,
        context_token_s=0.26e-6,
        page_copy_s=0.35e-3,
        load_byte_s=1 / 24e9,
    ),
)

# Two cores, the model of 110M parameters of bench/workload.py. From bench/results/offline-2026-11-20.json: 64 requests
# of 64 + 64 tokens with 32 adapters took 5.45 s. How that divides is our estimate: 4,096 tokens of prefill at 0.25 ms =
# 1.0 s; 63 steps of 69 ms = 12 + 64 * 0.85 + 64 * 96 * 0.0005. A page is 192 KiB, copied at 5 GB/s in 40 us.
CPU_110M = Machine(
    name="110M on two cores",
    shape=llama_shape(
        num_layers=12,
        hidden_size=768,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=2048,
        vocab_size=32000,
        element_bytes=2,
    ),
    adapted=ALL_LINEARS,
    pool_tokens=16_384,
    costs=CostModel(
        step_s=12e-3,
        token_s=0.25e-3,
        decode_s=0.85e-3,
        context_token_s=0.5e-6,
        page_copy_s=40e-6,
        load_byte_s=1 / 5e9,
    ),
)

MACHINES = {"a10g": A10G_7B, "a100": A100_7B, "cpu": CPU_110M}
