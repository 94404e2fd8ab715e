"""One sequence with weights of 4 bits, beside llama.cpp's with the same threads and shape.

    cmake -B build -DGGML_NATIVE=ON -DLLAMA_CURL=OFF && cmake --build build --target llama-bench  # where llama.cpp is
    python -m bench.llama_cpp --llama-bench build/bin/llama-bench

llama.cpp reads a file in Q4_0 with a head in Q8_0, and slora rounds the same shape to int4 with a head in int8: a
weight of a layer has 4.5 bits on both sides. The weights are random, since no answer is read. Both run in turns.

Compiled with gcc 12, its AMX kernels end with an illegal instruction: the compiler removes the stores of the tile
configuration before `_tile_loadconfig`. An `asm volatile` with a "memory" clobber before that call keeps them.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch

from bench.decode_loop import SIZES, run_steps, time_prompts
from bench.stepped_engine import SteppedEngine
from bench.workload import ModelSize, prompts, write_model

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, size: ModelSize) -> None:
    """A Llama with random weights, and made-up names of tokens."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(size.positions)
    writer.add_embedding_length(size.hidden)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(size.intermediate)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_key_length(size.head_dim)
    writer.add_value_length(size.head_dim)
    writer.add_rope_dimension_count(size.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size.vocab)
    # llama-bench draws the tokens of its prompts from the vocabulary.
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"t{token}" for token in range(3, size.vocab))])
    writer.add_token_scores([0.0] * size.vocab)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (size.vocab - 3))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)

    def add(name: str, shape: tuple[int, int], form: gguf.GGMLQuantizationType) -> None:
        numbers = random.standard_normal(shape, np.float32) * np.float32(0.02)
        writer.add_tensor(name, gguf.quants.quantize(numbers, form), raw_dtype=form)

    forms = gguf.GGMLQuantizationType
    ones = np.ones(size.hidden, np.float32)
    add("token_embd.weight", (size.vocab, size.hidden), forms.Q8_0)
    add("output.weight", (size.vocab, size.hidden), forms.Q8_0)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(size.layers):
        for name, shape in size.widths.items():
            add(f"blk.{layer}.{_NAMES[name]}.weight", shape, forms.Q4_0)
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_llama_bench(
    program: Path, model: Path, threads: int, input_tokens: int, output_tokens: int
) -> tuple[float, float]:
    """Tokens per second of a prompt, and of the decode that begins without one."""
    command = [
        program,
        "-m",
        model,
        "-t",
        threads,
        "-p",
        input_tokens,
        "-n",
        output_tokens,
        "-r",
        1,
        "-o",
        "json",
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, encoding="utf-8", check=True)
    rows = {(row["n_prompt"], row["n_gen"]): row["avg_ts"] for row in json.loads(done.stdout)}
    return rows[input_tokens, 0], rows[0, output_tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.sizes:
        size = SIZES[name]
        with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
            file, model = Path(directory) / "model.gguf", Path(directory) / "model"
            write_gguf(file, size)
            write_model(model, torch.bfloat16, size)
            settings = {"dtype": "bfloat16", "quantization": "int4", "pool_bytes": 1 << 30, "swap_bytes": 0}
            engine = SteppedEngine(model, [], settings)
            long, short = prompts(1, options.input_tokens), prompts(1, 1)
            ours, theirs = [], []
            for _ in range(options.rounds):
                theirs.append(
                    run_llama_bench(
                        options.llama_bench,
                        file,
                        options.threads,
                        options.input_tokens,
                        options.output_tokens,
                    )
                )
                prompt_s = time_prompts(engine, long, [()])
                steps = run_steps(engine, short, [()], seconds=2.0)
                ours.append((options.input_tokens / prompt_s, 1 / statistics.median(steps)))
        for kind, mine, peer in zip(
            ("prompt", "decode"), zip(*ours, strict=True), zip(*theirs, strict=True), strict=True
        ):
            own, other = statistics.median(mine), statistics.median(peer)
            print(f"{name}, {kind}: {own:.1f} tokens/s, llama.cpp {other:.1f}, ratio {own / other:.2f}")


if __name__ == "__main__":
    main()
