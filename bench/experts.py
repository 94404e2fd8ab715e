"""Decode of a mixture of experts: our own decoder, transformers' classes inside slora and alone, and peft.

    python -m bench.experts [--batches 1 16 64] [--threads 2] [--write FILE]

The model is a Qwen3-MoE with random weights in bf16: 12 layers, 32 experts of width 256, of which 8 compute each token.
Prompts have 64 tokens and answers 64. "attention" stands for 8 adapters of rank 8 on the attention linears, used in
turn, and "experts" for 8 on all experts as well. peft computes the whole batch with one adapter, because it can't mix
adapters of experts. `--model-impl transformers` computed these models before slora had a decoder for them. The ways
alternate in each round, and a figure is the median of the rounds.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.stepped_engine import SteppedEngine
from bench.table import Row, print_table, write_json

PROMPT_TOKENS, OUTPUT_TOKENS, NUM_ADAPTERS = 64, 64, 8
OWN, INSIDE, ALONE, PEFT = "slora", "slora, transformers' classes", "transformers", "transformers + peft"
NONE, ATTENTION, EXPERTS = "none", "attention", "experts"
_SETTINGS = {"dtype": "bfloat16", "pool_bytes": 1 << 30, "swap_bytes": 0}


def make_model(folder: Path) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        moe_intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=8,
        max_position_embeddings=4096,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder / "model")
    return model


def configure(targets: str) -> LoraConfig:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if targets == EXPERTS else None
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return LoraConfig(r=8, target_modules=modules, target_parameters=parameters, init_lora_weights=False)


def write_adapters(model: PreTrainedModel, folder: Path, targets: str) -> list[Path]:
    config = configure(targets)
    paths = [folder / f"{targets}-{number}" for number in range(NUM_ADAPTERS)]
    for path in paths:
        adapted = get_peft_model(model, config)
        adapted.save_pretrained(path)
        adapted.unload()
    return paths


def prompts(batch: int) -> list[list[int]]:
    drawn = torch.randint(10, 32000, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    return drawn.tolist()


def slora_way(engine: SteppedEngine, first: int | None) -> Callable[[int], float]:
    """first: the index of the first adapter. None: no adapters."""

    def run(batch: int) -> float:
        adapters = [() if first is None else (first + number % NUM_ADAPTERS,) for number in range(batch)]
        engine.add(prompts(batch), adapters, OUTPUT_TOKENS)
        began = time.perf_counter()
        num_tokens = engine.finish()
        return num_tokens / (time.perf_counter() - began)

    return run


def transformers_way(model: PreTrainedModel) -> Callable[[int], float]:
    def run(batch: int) -> float:
        tokens = torch.tensor(prompts(batch))
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=OUTPUT_TOKENS,
                max_new_tokens=OUTPUT_TOKENS,
                pad_token_id=0,
            )
        return batch * OUTPUT_TOKENS / (time.perf_counter() - began)

    return run


def measure(folder: Path, batches: list[int], rounds: int) -> list[Row]:
    model = make_model(folder)
    on_attention = write_adapters(model, folder, ATTENTION)
    on_experts = write_adapters(model, folder, EXPERTS)
    own = SteppedEngine(folder / "model", [*on_attention, *on_experts], _SETTINGS)
    inside = SteppedEngine(folder / "model", on_attention, {**_SETTINGS, "model_impl": "transformers"})
    adapted = get_peft_model(copy.deepcopy(model), configure(EXPERTS))
    ways = {
        (OWN, NONE): slora_way(own, None),
        (OWN, ATTENTION): slora_way(own, 0),
        (OWN, EXPERTS): slora_way(own, NUM_ADAPTERS),
        (INSIDE, NONE): slora_way(inside, None),
        (INSIDE, ATTENTION): slora_way(inside, 0),
        (ALONE, NONE): transformers_way(model),
        (PEFT, EXPERTS): transformers_way(adapted),
    }
    rows: list[Row] = []
    for batch in batches:
        rates: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, run in ways.items():
                rates[way].append(run(batch))
        # The first round compiles kernels.
        medians = {way: statistics.median(seen[1:]) for way, seen in rates.items()}
        for (name, targets), rate in medians.items():
            rows.append(
                {
                    "batch": batch,
                    "computed by": name,
                    "adapters": targets,
                    "tokens/s": round(rate, 1),
                    "slora is faster by": round(medians[OWN, targets] / rate, 2),
                    "of slora without": round(rate / medians[OWN, NONE], 2),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", type=Path, help="write the rows to a file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="slora-experts-") as folder:
        rows = measure(Path(folder), options.batches, options.rounds)
    print_table("decode of a mixture of experts", rows)
    if options.write:
        write_json(options.write, {"experts": rows}, {"threads": options.threads, "torch": torch.__version__})


if __name__ == "__main__":
    main()
