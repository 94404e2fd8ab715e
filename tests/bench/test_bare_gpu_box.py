"""On a box that is lent with its GPU there is torch, triton, transformers, peft and what tests need, and no server: all
that runs there must import there."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ABSENT = ("fastapi", "llguidance", "llvmlite", "numba", "pydantic", "redis", "starlette", "uvicorn", "zmq")
# Only numba compiles; of a peer, and only run in its own environment; of Redis; of a server; of
# structured output.
NOT_THERE = (
    "slora_kernels/cpu/workers/",
    "slora_kernels/cpu/precompile",
    "contenders/vllm_",
    "redis_",
    "_redis",
    "bench/attacks/",
    "grammar/lark_grammar",
)
# These talk to a server, which there is none of.
OF_A_SERVER = (
    "adapter_depot",
    "batches",
    "cold_start",
    "console",
    "live_platform",
    "load_storm",
    "load_stream",
    "loading",
    "many_adapters",
    "null_server",
    "ping_redis",
    "random_server",
    "ray_hop",
    "serving",
    "serving_peers",
    "structured",
    "tier_rates",
)


def module_names() -> list[str]:
    """Of kernels, adapters, engine and bench."""
    roots = {"kernels": "slora_kernels", "adapters": "slora_adapters", ".": "slora", "": "bench"}
    names = []
    for root, package in roots.items():
        for path in sorted((ROOT / root / package).rglob("*.py")):
            relative = path.relative_to(ROOT / root)
            of_a_server = package == "bench" and path.stem in OF_A_SERVER
            if not of_a_server and not any(part in str(relative) for part in NOT_THERE):
                names.append(".".join(relative.with_suffix("").parts).removesuffix(".__init__"))
    return names


def test_kernels_adapters_engine_and_bench_import_on_a_bare_gpu_box() -> None:
    code = f"""
import gc, importlib, sys
gc.disable()
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    roots = [str(ROOT / folder) for folder in ("", "kernels", "adapters")]
    names = module_names()
    assert {
        "slora.runner.runner",
        "slora_kernels.gpu.triton_kernels",
        "slora_adapters.peft.packing",
        "bench.gpu.stages",
    } <= {*names}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *names],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True,
        text=True,
        timeout=600,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
