"""Trains the adapters of the demo on SmolLM2-135M-Instruct, with examples made by rules (see `demo.tasks`).

    python -m demo.train                        # all six adapters, about an hour on two cores
    python -m demo.train --tasks sql labels     # some of them

Each adapter is then evaluated on held-out examples. The results are printed and kept in evaluation.json beside the
adapters. `python -m demo.evaluate` repeats the evaluation.

Seeds are fixed, but another processor or another number of threads rounds sums in another order, so the adapters differ
in their last bits.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers.utils import logging

from demo.evaluate import DIRECTORY, TEMPLATE, evaluate, render
from demo.first_adapter import REAL_MODEL, load
from demo.tasks import TASKS, Pool, Task

__all__ = ["BASE_NAME", "main", "train_adapter"]

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
BATCH_SIZE = 8
# So many batches are drawn at once and sorted by length, which leaves little padding.
BATCHES_DRAWN_TOGETHER = 8
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 10
IGNORED = -100  # the label that torch's cross_entropy skips


def draw_batches(task: Task, tokenizer: Any, pool: Pool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draws batches of token ids and labels, both int64 [B, T], padded on the right."""
    rows = []
    for _ in range(BATCH_SIZE * BATCHES_DRAWN_TOGETHER):
        example = task.draw(pool)
        prompt = tokenizer(render(tokenizer, task, example))["input_ids"]
        answer = tokenizer(example.answer + tokenizer.eos_token)["input_ids"]
        rows.append((prompt + answer, [IGNORED] * len(prompt) + answer))
    rows.sort(key=lambda row: len(row[0]))
    batches = []
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        ids = torch.full((len(batch), max(len(row) for row, _ in batch)), tokenizer.eos_token_id)
        labels = torch.full_like(ids, IGNORED)
        for at, (row, label) in enumerate(batch):
            ids[at, : len(row)], labels[at, : len(label)] = torch.tensor(row), torch.tensor(label)
        batches.append((ids, labels))
    pool.rng.shuffle(batches)
    return batches


def answer_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the answer tokens, in nats. Only their logits are computed."""
    decoder = model.get_base_model()
    hidden = decoder.model(ids, use_cache=False).last_hidden_state[:, :-1]
    is_answer = labels[:, 1:] != IGNORED
    logits = decoder.lm_head(hidden[is_answer])
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:][is_answer])


def train_adapter(task: Task, model_path: Path, directory: Path, steps: int) -> None:
    """Trains one adapter and saves it in bfloat16 under `directory`."""
    torch.manual_seed(20)
    pool = Pool(random.Random(f"20 {task.name}"), held_out=False)
    model, tokenizer = load(model_path)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=task.r, lora_alpha=2 * task.r, target_modules=list(task.target_modules)
    )
    adapted = get_peft_model(model, config)
    # peft keeps the targets as a set, so their order in the saved file would differ from run to run.
    config.base_model_name_or_path = BASE_NAME
    config.target_modules = sorted(task.target_modules)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / WARM_UP_STEPS, 0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        ),
    )
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    with tqdm(total=steps, desc=task.name, unit="step", dynamic_ncols=True) as progress:
        for _ in range(steps):
            batches = batches or draw_batches(task, tokenizer, pool)
            loss = answer_loss(adapted, *batches.pop())
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            progress.set_postfix(loss=f"{loss.item():.4f}")
            progress.update()
    adapted.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)  # peft's model card is an unfilled template
    weights = directory / "adapter_model.safetensors"
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    save_file(rounded, weights, metadata={"format": "pt"})
    (directory / "generation_config.json").write_text(
        '{"temperature": 0.0, "max_new_tokens": 200}\n', encoding="utf-8"
    )
    if task.name == "tools":
        (directory / TEMPLATE.name).write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains adapters into --output, and evaluates them."""
    parser = argparse.ArgumentParser(description="Trains the adapters of the demo.")
    parser.add_argument(
        "--model", type=Path, default=REAL_MODEL, help="GGUF file that `slora demo` downloads"
    )
    parser.add_argument("--output", type=Path, default=DIRECTORY, help="directory to write NAME/ to")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--steps", type=int, help="for a trial: other than the steps of each task")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    for name in options.tasks:
        directory = options.output / name
        train_adapter(TASKS[name], options.model, directory, options.steps or TASKS[name].steps)
        print(json.dumps(evaluate(options.model, options.output, [name])), flush=True)


if __name__ == "__main__":
    main()
