"""Switches Triton to its interpreter where there is no GPU, before any test imports it.

Triton reads the switch when a kernel or one of its own library functions is defined, and transformers imports
Triton, so a test folder's own conftest would come too late.
"""

import os
from pathlib import Path

# NVIDIA's and AMD's device files; asking torch would import it into tests of processes that never do.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"
