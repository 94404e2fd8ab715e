"""Offline throughput: tokens per second with 0, 1, 8 and 32 adapters, transformers + peft beside it in the same run.

    python bench/offline.py [--adapters 0 1 8 32] [--requests 64] [--repeats 3] [--json FILE]

64 requests of 64 random prompt tokens and 64 new tokens each, greedy, end of sequence ignored, adapters of ranks
8/16/32/64 on all seven linears given out round robin. Each contender runs in a process of its own with the same
number of threads; a round runs each once, so that a drift of the machine meets all alike. The figure is
generated tokens over the whole wall time, prefill included, after a warm-up; absolute numbers mean little on a
shared machine: read the ratios.

peft runs in its best case: one batch of equal lengths with `adapter_names`, no arrivals, no paging.
"""

import argparse
import csv
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from workload import prompts, write_adapter, write_model

CONTENDERS = ("slora", "peft")
# The bars of the first release: times peft's tokens per second.
BARS = {8: 2.0, 32: 4.0}
Generate = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Workload:
    model: str
    adapters: list[str]
    requests: int
    input_tokens: int
    output_tokens: int
    dtype: str
    threads: int
    kernels: str


@dataclass(frozen=True, slots=True)
class Row:
    """tokens_per_s: median over the rounds. ratio: over peft's of the same number of adapters."""

    contender: str
    adapters: int
    tokens_per_s: float
    slowest: float
    fastest: float
    peak_rss_mib: int
    ratio: float | None = None


def prepare_slora(workload: Workload) -> Generate:
    from slora import LLM, SamplingParams  # noqa: PLC0415 (a contender imports only its own stack)

    # The same prompts come again in each repeat: nobody shall find them computed.
    llm = LLM(
        workload.model,
        dtype=workload.dtype,
        kernels=workload.kernels,
        pool_bytes=2 << 30,
        prefix_cache="off",
    )
    asked = prompts(workload.requests, workload.input_tokens)
    params = SamplingParams(max_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True)
    given: list[str | None] = [_round_robin(workload.adapters, i) for i in range(len(asked))]

    def generate() -> int:
        return sum(len(output.token_ids) for output in llm.generate(asked, params, given))

    return generate


def prepare_peft(workload: Workload) -> Generate:
    from peft import PeftModel  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=getattr(torch, workload.dtype)).eval()
    for index, path in enumerate(workload.adapters):
        if index == 0:
            model = PeftModel.from_pretrained(model, path, adapter_name="a0")
        else:
            model.load_adapter(path, adapter_name=f"a{index}")
    model = model.eval()
    asked = torch.tensor(prompts(workload.requests, workload.input_tokens))
    chosen = {}
    if workload.adapters:
        chosen = {"adapter_names": [f"a{i % len(workload.adapters)}" for i in range(len(asked))]}
    new = workload.output_tokens

    def generate() -> int:
        with torch.inference_mode():
            out = model.generate(
                input_ids=asked,
                attention_mask=torch.ones_like(asked),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                **chosen,
            )
        return int((out.shape[1] - asked.shape[1]) * out.shape[0])

    return generate


def _round_robin(adapters: list[str], index: int) -> str | None:
    return adapters[index % len(adapters)] if adapters else None


def contender_process(name: str, workload: Workload, pipe: Connection) -> None:
    """Answers each "run" with (tokens, seconds, peak RSS in MiB) until told to stop."""
    torch.set_num_threads(workload.threads)
    generate = {"slora": prepare_slora, "peft": prepare_peft}[name](workload)
    generate()
    pipe.send("ready")
    while pipe.recv() == "run":
        start = time.perf_counter()
        tokens = generate()
        seconds = time.perf_counter() - start
        pipe.send((tokens, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))


def measure(workload: Workload, repeats: int, contenders: list[str]) -> list[Row]:
    """One process for each contender, in turn within every round; idle ones sleep on their pipe."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for name in contenders:
        # As `slora serve` starts its engine; peft runs with what torch does by itself.
        os.environ.pop("GOMP_SPINCOUNT", None)
        if name == "slora":
            os.environ["GOMP_SPINCOUNT"] = "10000"
        pipes[name], other = context.Pipe()
        process = context.Process(target=contender_process, args=(name, workload, other))
        process.start()
        other.close()
        processes.append(process)
        pipes[name].recv()
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    rss = dict.fromkeys(contenders, 0)
    for _ in range(repeats):
        for name in contenders:
            pipes[name].send("run")
            tokens, seconds, rss[name] = pipes[name].recv()
            rates[name].append(tokens / seconds)
    for name, process in zip(contenders, processes, strict=True):
        pipes[name].send("stop")
        process.join()
    peft = statistics.median(rates["peft"]) if "peft" in rates else None
    return [
        Row(
            name,
            len(workload.adapters),
            round(statistics.median(values), 1),
            round(min(values), 1),
            round(max(values), 1),
            rss[name],
            round(statistics.median(values) / peft, 2) if peft else None,
        )
        for name, values in rates.items()
    ]


def print_table(rows: list[Row]) -> None:
    print(
        f"\n{'':8}{'adapters':>9}{'tokens/s':>10}{'min':>8}{'max':>8}{'peak RSS MiB':>14}{'x peft':>8}  bar"
    )
    for row in rows:
        bar = BARS.get(row.adapters) if row.contender == "slora" else None
        verdict = (
            "" if bar is None or row.ratio is None else f">= {bar}: {'met' if row.ratio >= bar else 'MISSED'}"
        )
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        print(
            f"{row.contender:8}{row.adapters:>9}{row.tokens_per_s:>10.1f}{row.slowest:>8.1f}{row.fastest:>8.1f}"
            f"{row.peak_rss_mib:>14}{ratio:>8}  {verdict}"
        )


def environment(options: argparse.Namespace) -> dict[str, str | int]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cores": os.cpu_count() or 0,
        "threads": options.threads,
        "dtype": options.dtype,
        "kernels": options.kernels,
        "requests": options.requests,
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens,
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--kernels", default="auto", help="slora's kernels: auto, numba or torch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--json", type=Path, help="write environment and rows here as well")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    dtype = getattr(torch, options.dtype)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        root = Path(directory)
        write_model(root / "model", dtype)
        for index in range(max(options.adapters)):
            write_adapter(root / f"adapter-{index}", index, dtype)
        for count in options.adapters:
            workload = Workload(
                model=str(root / "model"),
                adapters=[str(root / f"adapter-{i}") for i in range(count)],
                requests=options.requests,
                input_tokens=options.input_tokens,
                output_tokens=options.output_tokens,
                dtype=options.dtype,
                threads=options.threads,
                kernels=options.kernels,
            )
            rows += measure(workload, options.repeats, options.contenders)
            print(f"{count} adapters: {rows[-len(options.contenders) :]}", file=sys.stderr)
    facts = environment(options)
    print(" ".join(f"{name}={value}" for name, value in facts.items()))
    print_table(rows)
    print()
    writer = csv.DictWriter(sys.stdout, list(asdict(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    if options.json:
        options.json.write_text(
            json.dumps({"environment": facts, "rows": [asdict(r) for r in rows]}, indent=2)
        )


if __name__ == "__main__":
    main()
