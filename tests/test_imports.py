"""Processes and commands import no more than they need. pyproject.toml has the contracts for the direction of
imports."""

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.peft_adapters import make_adapter
from tests.support.tiny_models import make_model, write_model

ROOT = Path(__file__).parents[1]
# In the order of the layers. Each layer may import the layers before it.
LAYERS = {
    "slora_kernels": ROOT / "kernels" / "slora_kernels",
    "slora_adapters": ROOT / "adapters" / "slora_adapters",
    "slora": ROOT / "slora",
    "slora_api": ROOT / "api" / "slora_api",
}
SOURCES = os.pathsep.join(str(folder.parent) for folder in LAYERS.values())


def run_python(code: str, *arguments: str, hidden: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new interpreter that cannot import the `hidden` packages."""
    hide = f"""
import gc, sys
gc.disable()
from importlib.machinery import PathFinder
class Finder:
    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] in {set(hidden)!r}
        return None if hidden else PathFinder.find_spec(name, path, target)
    find_distributions = staticmethod(PathFinder.find_distributions)
sys.meta_path[:] = [Finder() if finder is PathFinder else finder for finder in sys.meta_path]
"""
    return subprocess.run(
        [sys.executable, "-P", "-c", hide + code, *arguments],
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=600,
        encoding="utf-8",
    )


def requirements(distribution: str) -> set[str]:
    """All packages that pip installs for `distribution` without extras, by canonical name, including the
    distribution itself."""
    found: set[str] = set()
    wanted = [distribution]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found:
            continue
        found.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return found


def test_llm_serves_adapters_where_only_its_own_requirements_are_installed(tmp_path: Path) -> None:
    """A bare machine: torch, transformers, safetensors, numpy, blake3, and what they need without triton."""
    own = ("torch", "transformers", "safetensors", "numpy", "blake3")
    allowed = set().union(*map(requirements, own)) - {"triton"} | {"slora"}
    hidden = {
        package
        for package, distributions in metadata.packages_distributions().items()
        if not {canonicalize_name(one) for one in distributions} & allowed
    }
    assert {"fastapi", "msgpack", "numba", "redis", "peft", "pytest", "triton"} <= hidden
    write_model(tmp_path / "base", "llama")
    make_adapter(tmp_path / "adapter", make_model("llama"), std=0.15)
    code = """
import asyncio
from slora import LLM, AsyncLLM, SamplingParams
params = SamplingParams(max_tokens=4, temperature=0)
llm = LLM(sys.argv[1], pool_bytes=1 << 22)
outputs = llm.generate([[1, 2], [1, 2]], params, [None, sys.argv[2]])
print(llm.info.kernels, *(len(output.token_ids) for output in outputs))
async def main():
    async with AsyncLLM(sys.argv[1], pool_bytes=1 << 22) as llm:
        assert await llm.generate([1, 2], params, sys.argv[2]) == outputs[1]
asyncio.run(main())
""" + print_errors(EXTRAS)
    done = run_python(code, str(tmp_path / "base"), str(tmp_path / "adapter"), hidden=hidden)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["torch 4 4", *EXTRAS.values()]


# The modules of the engine that an API process imports. It imports all modules of the layers below and above the
# engine.
LIGHT = [
    "slora",
    "slora.text.answer",
    "slora.text.detokenizer",
    "slora.client.client",
    "slora.core.engine_state",
    "slora.core.messages",
    "slora.core.errors",
    "slora.text.generation_defaults",
    "slora.models.model_config",
    "slora.models.model_spec",
    "slora.client.open_requests",
    "slora.core.request_check",
    "slora.core.request",
    "slora.core.sampling_params",
    "slora.text.tokenizer",
    "slora_kernels.layout",
]


def test_api_and_loader_processes_need_no_torch() -> None:
    layers = [LAYERS["slora_adapters"], LAYERS["slora_api"]]
    files = [(folder.parent, path) for folder in layers for path in sorted(folder.rglob("*.py"))]
    names = [".".join(path.relative_to(root).with_suffix("").parts) for root, path in files]
    names.remove("slora_api.adapters.verify_command")  # a command that computes a model in its own process
    code = "".join(f"import {name}\n" for name in [*LIGHT, *names])
    done = run_python(code, hidden=["torch", "triton", "transformers", "numba", "llvmlite"])
    assert done.returncode == 0, done.stderr


KERNELS = {"triton": "triton", "numba": "cpu"}
# What they say without the package.
EXTRAS = {
    "triton": "the kernels 'triton' need the package triton: pip install 'slora[gpu]'",
    "numba": "this installation has no machine code of the kernels 'cpu' for this CPU, so they need the package numba: "
    "pip install numba",
}


def print_errors(packages: Iterable[str]) -> str:
    """Code that prints what the selection of kernels says without each of the packages."""
    return f"""
import torch
from slora_kernels.kernel_selector import select_kernels
for name in {[KERNELS[package] for package in packages]!r}:
    try:
        select_kernels(name, torch.device("cpu"))
    except ValueError as error:
        print(error)
"""


@pytest.mark.soak
@pytest.mark.parametrize("hidden", [[*EXTRAS], *([name] for name in EXTRAS)], ids="-".join)
def test_an_engine_needs_only_the_kernels_that_it_runs(hidden: list[str]) -> None:
    code = """
import torch
from slora.engine import process
from slora_kernels.kernel_selector import select_kernels
print(select_kernels("auto", torch.device("cpu")).name)
"""
    done = run_python(code + print_errors(hidden), hidden=hidden)
    assert done.returncode == 0, done.stderr
    chosen, *errors = done.stdout.splitlines()
    assert chosen == ("torch" if "numba" in hidden else "cpu")
    assert errors == [EXTRAS[package] for package in hidden]


def test_the_engine_starts_before_the_database_and_the_routes_are_imported() -> None:
    """Nor do the commands of adapters import them, or a client of the hub."""
    # FastAPI takes as long to import as all else in the main process. It must be installed, but not imported.
    code = "import slora_api.serve.serve\nimport slora_api.adapters.command\n"
    code += "assert not {'fastapi', 'uvicorn'} & sys.modules.keys()"
    done = run_python(code, hidden=["torch", "sqlalchemy", "alembic", "numba", "huggingface_hub"])
    assert done.returncode == 0, done.stderr


def test_help_waits_for_no_web_framework() -> None:
    done = run_python(
        "sys.argv = ['slora', '--help']\nfrom slora_api.cli.main import main\nmain()",
        hidden=["torch", "fastapi", "uvicorn", "httpx", "tokenizers", "redis", "numpy"],
    )
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


@pytest.mark.parametrize(
    "expected",
    [
        {"tenant list": ("httpx", "serve"), "serve": ("uvicorn", "serve")},
        pytest.param({"adapter verify a --model b": ("peft", "verify")}, marks=pytest.mark.soak),
    ],
    ids=["serve", "verify"],
)
def test_a_command_whose_extra_is_missing_names_it(expected: dict[str, tuple[str, str]]) -> None:
    code = "from slora_api.cli.main import main\nfor command in sys.argv[1:]: print(main(command.split()))"
    done = run_python(code, *expected, hidden=[package for package, _ in expected.values()])
    assert done.stdout.split() == ["2"] * len(expected), done.stderr
    messages = [line for line in done.stderr.splitlines() if line]
    for message, (package, extra) in zip(messages, expected.values(), strict=True):
        assert f"needs the package {package}" in message and f"pip install 'slora[{extra}]'" in message
