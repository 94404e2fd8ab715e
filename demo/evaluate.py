"""Evaluates the adapters of the demo with transformers and peft: right answers to held-out examples, base beside them.

    python -m demo.evaluate            # 50 examples for each adapter, in float32; also in evaluation.json

Decoding is greedy. What counts as right is the rule of each task in `demo.tasks`. This module does not import slora, so
its figures hold for any software that runs the same files.
"""

import argparse
import copy
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers.utils import logging

from demo.first_adapter import REAL_MODEL, load
from demo.tasks import TASKS, Example, Pool, Task

__all__ = ["DIRECTORY", "draw_held_out", "evaluate", "main", "render"]

DIRECTORY = Path(__file__).parent / "smollm2" / "adapters"
RESULTS_NAME = "evaluation.json"
TEMPLATE = DIRECTORY / "tools" / "chat_template.jinja"
NUM_EXAMPLES = 50
BATCH_SIZE = 25
MAX_NEW_TOKENS = 96


def render(tokenizer: Any, task: Task, example: Example) -> str:
    """The prompt of an example, with the template of the base or that of the adapter."""
    template = TEMPLATE.read_text(encoding="utf-8") if task.name == "tools" else None
    messages: list[Any] = copy.deepcopy(list(example.messages))
    # A request has arguments as text. Templates get them as an object.
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = tokenizer.apply_chat_template(
        messages,
        tools=list(example.tools) or None,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    return str(text)


def draw_held_out(task: Task, num_examples: int) -> list[Example]:
    """Returns examples of which no value occurs in training. The same number returns the same examples."""
    pool = Pool(random.Random(f"held out {task.name}"), held_out=True)
    return [task.draw(pool) for _ in range(num_examples)]


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[str]:
    """Returns the greedy answer to each prompt."""
    answers: list[str] = []
    for start in range(0, len(prompts), BATCH_SIZE):
        encoded = tokenizer(
            list(prompts[start : start + BATCH_SIZE]), return_tensors="pt", padding=True, padding_side="left"
        )
        generated = model.generate(
            **encoded,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        answers += tokenizer.batch_decode(
            generated[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return answers


def evaluate(
    model_path: Path, directory: Path, names: Sequence[str], num_examples: int = NUM_EXAMPLES
) -> Mapping[str, Any]:
    """Measures adapters and the base, and writes the results to evaluation.json beside the adapters."""
    results: dict[str, Any] = {}
    for name in names:
        task = TASKS[name]
        examples = draw_held_out(task, num_examples)
        model, tokenizer = load(model_path)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        prompts = [render(tokenizer, task, example) for example in examples]
        base = answer(model.eval(), tokenizer, prompts)
        adapted = PeftModel.from_pretrained(model, directory / name).eval()
        given = answer(adapted, tokenizer, prompts)
        wrong = [
            {"wanted": example.answer, "given": text}
            for example, text in zip(examples, given, strict=True)
            if not task.is_right(example, text)
        ]
        results[name] = {
            "examples": num_examples,
            "right": (num_examples - len(wrong)) / num_examples,
            "right_without_adapter": sum(map(task.is_right, examples, base)) / num_examples,
            "first_wrong_answers": wrong[:3],
        }
    path = directory / RESULTS_NAME
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**kept, **results}, indent=2) + "\n", encoding="utf-8")
    return results


def main() -> None:
    """Prints the results as a table."""
    parser = argparse.ArgumentParser(description="Counts the right answers of the demo's adapters.")
    parser.add_argument(
        "--model", type=Path, default=REAL_MODEL, help="GGUF file that `slora demo` downloads"
    )
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="has the adapters")
    parser.add_argument("--examples", type=int, default=NUM_EXAMPLES)
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    options = parser.parse_args()
    logging.set_verbosity_error()
    print(f"{'':12}{'right':>8}{'base':>8}")
    for name in options.tasks:
        row = evaluate(options.model, options.directory, [name], options.examples)[name]
        print(f"{name:12}{row['right']:8.0%}{row['right_without_adapter']:8.0%}", flush=True)


if __name__ == "__main__":
    main()
