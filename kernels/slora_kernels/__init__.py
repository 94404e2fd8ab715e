"""The kernels of slora: attention, LoRA and sampling on CPUs and GPUs.

Importing this package applies `SLORA_CPU_ISA` and sets how long OpenMP's threads spin. Both must happen before torch is
loaded.
"""

import os

from slora_kernels.cpu_isa import apply_cpu_isa

apply_cpu_isa()

# By spinning while they wait, OpenMP threads occupy the cores of this process and of other programs. A decode step of
# 64 rows on 2 cores then took 2 to 8 times longer (medians, CPU bench), and a product beside a busy program 20 times.
# If threads sleep at once (OMP_WAIT_POLICY=PASSIVE), the speed on free cores drops by a quarter. Spinning for a few
# microseconds bridges the gaps within a step. A value that the operator sets takes precedence.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
