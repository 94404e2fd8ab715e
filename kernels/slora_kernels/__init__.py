"""The kernels of slora: attention, LoRA and sampling on CPUs and GPUs.

Importing this package applies `SLORA_CPU_ISA`, which must happen before torch is loaded.
"""

from slora_kernels.cpu_isa import apply_cpu_isa

apply_cpu_isa()
