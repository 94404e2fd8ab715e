"""How long loading a model takes beside merely reading its files, and how much memory beside its weights.

    python bench/weights.py [--gigabytes 2] [--rounds 5] [--json FILE]

A random checkpoint in four shards is written to a temporary directory. In each round every contender runs once in a
process of its own, in turn. Cold: the files are dropped from the page cache before each of them; warm: they are in it.

    read    the files into one buffer a thread, again and again: what the disk or the page cache delivers
    fill    the files into fresh memory of their size: a model has to lie somewhere, and the system clears it first
    load    our decoder, ready to compute

Memory: the peak of the resident set while loading, less what the process had after its imports, over the bytes of the
weights as they are served.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from slora.models.decoder import Decoder
from slora.models.families import read_model_config
from slora.models.weights.checkpoint import Checkpoint
from slora.models.weights.linear import QuantizedWeight
from slora.models.weights.weight_reader import WeightReader

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 2048, 8192, 16, 4, 16000
SHARDS = 4
THREADS = 4
CHUNK_BYTES = 4 << 20
CONTENDERS = ("read", "fill", "load")
# Stored as, served as, and the form of the layers' weights if not that.
CASES = (
    ("bfloat16", "bfloat16", None),
    ("float32", "bfloat16", None),
    ("bfloat16", "bfloat16", torch.int8),
    ("bfloat16", "bfloat16", torch.float8_e4m3fn),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds and ratios are medians over the rounds; a ratio is one of the same round."""

    stored: str
    served: str
    cache: str
    read_s: float
    fill_s: float
    load_s: float
    load_over_read: float
    load_over_fill: float
    peak_over_weights: float


def write_model(directory: Path, dtype: torch.dtype, num_bytes: int) -> None:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    layer_bytes = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    layers = max(1, round((num_bytes - 2 * VOCAB * HIDDEN * dtype.itemsize) / layer_bytes))
    names = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
    names |= {f"model.layers.{i}.{path}": shape for i in range(layers) for path, shape in shapes.items()}
    weight_map = {
        f"{name}.weight": f"model-{i * SHARDS // len(names)}.safetensors" for i, name in enumerate(names)
    }
    for file in sorted(set(weight_map.values())):
        held = [name for name in names if weight_map[f"{name}.weight"] == file]
        save_file({f"{name}.weight": torch.randn(names[name]).to(dtype) for name in held}, directory / file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map}), encoding="utf-8"
    )
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "num_hidden_layers": layers, "hidden_size": HIDDEN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 2048, "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def set_cache(files: list[Path], *, warm: bool) -> None:
    for path in files:
        with path.open("rb") as file:
            if warm:
                while file.read(CHUNK_BYTES):
                    pass
            else:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files(files: list[Path], *, fill: bool) -> None:
    """As many threads as the reader has, each a stretch of all files' bytes."""

    def read(path: Path, start: int, end: int) -> bytearray:
        memory = bytearray(0) if fill else bytearray(CHUNK_BYTES)
        view = torch.empty(end - start, dtype=torch.uint8).numpy().data if fill else memoryview(memory)
        with path.open("rb") as file:
            for at in range(start, end, CHUNK_BYTES):
                size = min(CHUNK_BYTES, end - at)
                part = view[at - start : at - start + size] if fill else view[:size]
                assert os.preadv(file.fileno(), [part], at) == size
        kept.append(view)
        return memory

    kept: list[memoryview] = []
    stretches = []
    for path in files:
        size = path.stat().st_size
        cuts = [size * i // THREADS for i in range(THREADS + 1)]
        stretches += [(path, *cut) for cut in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(THREADS) as executor:
        list(executor.map(lambda stretch: read(*stretch), stretches))


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def weight_bytes(decoder: Decoder) -> int:
    """Of all tensors, each once."""
    seen: dict[int, int] = {}

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.data_ptr()] = value.nbytes
        elif isinstance(value, QuantizedWeight):
            add(value.values), add(value.scales)
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        elif hasattr(value, "__slots__"):
            for name in value.__slots__:
                add(getattr(value, name))

    add(list(vars(decoder).values()))
    return sum(seen.values())


def contender(
    name: str,
    directory: Path,
    dtype: str,
    form: torch.dtype | None,
    results: "multiprocessing.Queue[tuple[float, float]]",
) -> None:
    """Puts (seconds, peak over weights, 0 if nothing was loaded) into the queue `results`."""
    torch.set_num_threads(os.cpu_count() or 1)
    files = sorted(directory.glob("*.safetensors"))
    config = read_model_config(directory)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts from here
    start = time.perf_counter()
    if name != "load":
        read_files(files, fill=name == "fill")
        results.put((time.perf_counter() - start, 0.0))
        return
    reader = WeightReader(Checkpoint(directory), getattr(torch, dtype), torch.device("cpu"), form=form)
    decoder = Decoder(config, reader, 128)
    seconds = time.perf_counter() - start
    results.put((seconds, (resident("VmHWM") - before) / weight_bytes(decoder)))


def run(
    name: str, directory: Path, served: str, form: torch.dtype | None, *, warm: bool
) -> tuple[float, float]:
    set_cache(sorted(directory.glob("*.safetensors")), warm=warm)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=contender, args=(name, directory, served, form, results))
    process.start()
    result: tuple[float, float] = results.get()
    process.join()
    return result


def measure(
    directory: Path, stored: str, served: str, form: torch.dtype | None, rounds: int, *, warm: bool
) -> Row:
    results = [
        {name: run(name, directory, served, form, warm=warm) for name in CONTENDERS} for _ in range(rounds)
    ]

    def median(name: str) -> float:
        return round(statistics.median(result[name][0] for result in results), 2)

    def ratio(floor: str) -> float:
        return round(statistics.median(result["load"][0] / result[floor][0] for result in results), 2)

    return Row(
        stored,
        served if form is None else str(form).removeprefix("torch."),
        "warm" if warm else "cold",
        median("read"),
        median("fill"),
        median("load"),
        ratio("read"),
        ratio("fill"),
        round(max(result["load"][1] for result in results), 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows = []
    for stored in ("bfloat16", "float32"):
        with tempfile.TemporaryDirectory(prefix="slora-bench-") as name:
            write_model(Path(name), getattr(torch, stored), int(options.gigabytes * 1e9))
            for _, served, form in (case for case in CASES if case[0] == stored):
                for warm in (False, True):
                    rows.append(measure(Path(name), stored, served, form, options.rounds, warm=warm))
                    print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
