"""On a box that is lent with its GPU there is torch, triton, transformers, peft and what tests need, and no server: all
that runs there must import there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


PACKAGES = {"slora_kernels": "kernels", "slora_adapters": "adapters", "slora": "", "bench": ""}


def find_modules() -> dict[str, Path]:
    """Of kernels, adapters, engine and bench: those of the box by name, with their files."""
    found = {}
    for package, root in PACKAGES.items():
        for path in sorted((ROOT / root / package).rglob("*.py")):
            relative = path.relative_to(ROOT / root)
            of_a_server = package == "bench" and path.stem in OF_A_SERVER
            if not of_a_server and not any(part in str(relative) for part in NOT_THERE):
                found[".".join(relative.with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def test_no_module_of_the_box_names_a_package_or_a_module_that_is_not_there() -> None:
    modules, wrong = find_modules(), []
    assert {
        "slora.runner.runner",
        "slora_kernels.gpu.triton_kernels",
        "slora_adapters.peft.packing",
        "bench.gpu.stages",
    } <= {*modules}
    for module, path in modules.items():
        for name in re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            package = name.partition(".")[0]
            is_file = (ROOT / PACKAGES.get(package, "tests") / f"{name.replace('.', '/')}.py").exists()
            if package in (*ABSENT, "slora_api") or (is_file and name not in modules):
                wrong.append(f"{module} imports {name}")
    assert not wrong


@pytest.mark.soak
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
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *find_modules()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True,
        text=True,
        timeout=600,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
