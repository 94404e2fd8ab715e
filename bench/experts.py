"""Decode of a mixture of experts: our own decoder, and transformers' classes inside slora and alone.

    python -m bench.experts [--batches 1 16 64] [--threads 2] [--write FILE]

The model is a Qwen3-MoE with random weights in bf16: 12 layers, 32 experts of width 256, of which 8 compute each token.
Prompts have 64 tokens and answers 64. "adapters" are 8 adapters of rank 8 on the attention linears, given out in turn.
`--model-impl transformers` computed these models before slora had a decoder for them. The ways alternate in each round,
and a figure is the median of the rounds.
"""

import argparse
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
OWN, INSIDE, ALONE = "slora", "slora, transformers' classes", "transformers"
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


def write_adapters(model: PreTrainedModel, folder: Path) -> list[Path]:
    config = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    paths = [folder / f"adapter-{number}" for number in range(NUM_ADAPTERS)]
    for path in paths:
        adapted = get_peft_model(model, config)
        adapted.save_pretrained(path)
        adapted.unload()
    return paths


def prompts(batch: int) -> list[list[int]]:
    drawn = torch.randint(10, 32000, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    return drawn.tolist()


def slora_way(engine: SteppedEngine, num_adapters: int) -> Callable[[int], float]:
    def run(batch: int) -> float:
        adapters = [(number % num_adapters,) if num_adapters else () for number in range(batch)]
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
    adapters = write_adapters(model, folder)
    own = SteppedEngine(folder / "model", adapters, _SETTINGS)
    inside = SteppedEngine(folder / "model", adapters, {**_SETTINGS, "model_impl": "transformers"})
    ways = {
        (OWN, 0): slora_way(own, 0),
        (OWN, NUM_ADAPTERS): slora_way(own, NUM_ADAPTERS),
        (INSIDE, 0): slora_way(inside, 0),
        (INSIDE, NUM_ADAPTERS): slora_way(inside, NUM_ADAPTERS),
        (ALONE, 0): transformers_way(model),
    }
    rows: list[Row] = []
    for batch in batches:
        rates: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, run in ways.items():
                rates[way].append(run(batch))
        # The first round compiles kernels.
        medians = {way: statistics.median(seen[1:]) for way, seen in rates.items()}
        for (name, num_adapters), rate in medians.items():
            ratio = medians[OWN, num_adapters] / rate
            rows.append(
                {
                    "batch": batch,
                    "computed by": name,
                    "adapters": num_adapters,
                    "tokens/s": round(rate, 1),
                    "slora is faster by": round(ratio, 2),
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
