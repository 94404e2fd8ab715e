"""Decode of a mixture of experts, and of models with recurrent layers, against transformers.

    python -m bench.experts [--parts experts hybrids] [--batches 1 16 64] [--threads 2] [--write FILE]

experts  Our own decoder, transformers' classes inside slora and alone, and peft. The model is a Qwen3-MoE with random
         weights in bf16: 12 layers, 32 experts of width 256, of which 8 compute each token. "attention" stands for 8
         adapters of rank 8 on the attention linears, used in turn, and "experts" for 8 on all experts as well. peft
         computes the whole batch with one adapter, because it can't mix adapters of experts. "transformers'
         classes" stands for `--model-impl transformers`, which computes the other mixtures.
hybrids  transformers' classes inside slora and alone, with transformers' own cache, for LFM2, Qwen3.5 and Granite 4.0
         with random weights, 109M to 121M: 12 layers, of which 4, 3 and 2 have attention. 24 decode steps count.

Prompts have 64 tokens, and answers of the mixture 64. The ways alternate in each round, and a figure is the median of
the rounds, or of the steps of all rounds.
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
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bench.stepped_engine import SteppedEngine
from bench.table import Row, print_table, write_json

PROMPT_TOKENS, OUTPUT_TOKENS, NUM_ADAPTERS = 64, 64, 8
HYBRID_STEPS = 24
OWN, INSIDE, ALONE, PEFT = "slora", "slora, transformers' classes", "transformers", "transformers + peft"
NONE, ATTENTION, EXPERTS = "none", "attention", "experts"
_SETTINGS = {"dtype": "bfloat16", "pool_bytes": 1 << 30, "swap_bytes": 0}


_HYBRID = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
_FULL, _LINEAR = "full_attention", "linear_attention"
# By the type of the model, the fields of its config that differ from `_HYBRID`.
HYBRIDS: dict[str, dict[str, object]] = {
    "lfm2": {
        "intermediate_size": 2560, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", _FULL] * 4,
    },
    "qwen3_5_text": {
        "head_dim": 64, "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL] * 3, "linear_num_key_heads": 6,
        "linear_num_value_heads": 12, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    "granitemoehybrid": {
        "shared_intermediate_size": 2048, "layer_types": [*[_LINEAR] * 5, _FULL] * 2, "num_local_experts": 0,
        "num_experts_per_tok": 0, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1,
        "mamba_expand": 2,
    },
}  # fmt: skip


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


def experts_part(folder: Path, batches: list[int], rounds: int) -> list[Row]:
    model = make_model(folder)
    on_attention = write_adapters(model, folder, ATTENTION)
    on_experts = write_adapters(model, folder, EXPERTS)
    adapters = [*on_attention, *on_experts]
    own = SteppedEngine(folder / "model", adapters, _SETTINGS)
    inside = SteppedEngine(folder / "model", adapters, {**_SETTINGS, "model_impl": "transformers"})
    adapted = get_peft_model(copy.deepcopy(model), configure(EXPERTS))
    ways = {
        (OWN, NONE): slora_way(own, None),
        (OWN, ATTENTION): slora_way(own, 0),
        (OWN, EXPERTS): slora_way(own, NUM_ADAPTERS),
        (INSIDE, NONE): slora_way(inside, None),
        (INSIDE, ATTENTION): slora_way(inside, 0),
        (INSIDE, EXPERTS): slora_way(inside, NUM_ADAPTERS),
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
    print_table("decode of a mixture of experts", rows)
    return rows


def make_hybrid(kind: str, dtype: torch.dtype, path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**_HYBRID, **HYBRIDS[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).eval()
    model.save_pretrained(path)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return loaded


def time_slora_steps(engine: SteppedEngine, batch: int) -> list[float]:
    engine.add(prompts(batch), [()] * batch, HYBRID_STEPS + batch)
    # Those who begin first go on until the last has begun.
    while len(engine.step()) < batch:
        pass
    seconds = []
    for _ in range(HYBRID_STEPS):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    engine.drop()
    return seconds


@torch.inference_mode()
def time_transformers_steps(model: PreTrainedModel, batch: int) -> list[float]:
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor(prompts(batch)), cache=cache, use_cache=True, logits_to_keep=1).logits
    seconds = []
    for _ in range(HYBRID_STEPS):
        began = time.perf_counter()
        tokens = logits[:, -1:].argmax(-1)
        logits = model(tokens, cache=cache, use_cache=True).logits
        seconds.append(time.perf_counter() - began)
    return seconds


def hybrids_part(folder: Path, batches: list[int], rounds: int) -> list[Row]:
    rows: list[Row] = []
    for kind in HYBRIDS:
        first = len(rows)
        for dtype in ("bfloat16", "float32"):
            path = folder / f"{kind}-{dtype}"
            model = make_hybrid(kind, getattr(torch, dtype), path)
            engine = SteppedEngine(path, [], {**_SETTINGS, "dtype": dtype})
            for batch in batches:
                own, theirs = [], []
                for number in range(rounds + 1):
                    pair = time_slora_steps(engine, batch), time_transformers_steps(model, batch)
                    # The first round compiles kernels.
                    own += pair[0] if number else []
                    theirs += pair[1] if number else []
                medians = [1e3 * statistics.median(seconds) for seconds in (own, theirs)]
                rows.append(
                    {
                        "model": kind,
                        "dtype": dtype,
                        "batch": batch,
                        "slora ms": round(medians[0], 1),
                        "transformers ms": round(medians[1], 1),
                        "slora is faster by": round(medians[1] / medians[0], 2),
                    }
                )
        print_table(f"decode of {kind}", rows[first:])
    return rows


PARTS: dict[str, Callable[[Path, list[int], int], list[Row]]] = {
    "experts": experts_part,
    "hybrids": hybrids_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", type=Path, help="write the rows to a file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, list[Row]] = {}
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="slora-experts-") as folder:
            found[part] = PARTS[part](Path(folder), options.batches, options.rounds)
    if options.write:
        write_json(options.write, found, {"threads": options.threads, "torch": torch.__version__})


if __name__ == "__main__":
    main()
