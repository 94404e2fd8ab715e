import json
import os
import subprocess
import sys

import pytest

LDS_BYTES = 64 * 1024
PRODUCTS = {
    "_lora_shrink_kernel",
    "_lora_expand_kernel",
    "_paged_attention_decode_kernel",
    "_paged_attention_prefill_kernel",
    "_quantized_linear_kernel",
}
OTHERS = {
    "_lora_look_up_kernel",
    "_merge_stretches_kernel",
    "_rotate_and_write_kv_kernel",
    "_rms_norm_kernel",
    "_act_mul_kernel",
}


@pytest.mark.parametrize("target", ("sm_90", "gfx942"))
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(target: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-P", "-m", "slora_kernels.ahead_of_time", target]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in compiled} == PRODUCTS | OTHERS
    for kernel in compiled:
        assert kernel["target"] == target and kernel["binary_bytes"] > 0
        assert kernel["matrix_cores"] == (kernel["kernel"] in PRODUCTS), kernel
        if target == "gfx942":
            assert kernel["shared_bytes"] <= LDS_BYTES, kernel
