"""Trains a first adapter on the demo's model. It turns a curt note into a polite mail of Acme.

    python demo/first_adapter.py my-adapter        # about two minutes on half of the cores of a laptop

The file contains everything that a fine-tune needs: examples, peft, a training loop and save_pretrained. It does not
import slora.
"""

import argparse
import os
import random
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

STEPS, BATCH = 25, 8
# `slora demo` keeps its model in the user's cache. If it could not be downloaded, the demo serves the model beside this
# file.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
REAL_MODEL = CACHE / "slora" / "demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_MODEL = REAL_MODEL if REAL_MODEL.exists() else Path(__file__).parent / "model"

NAMES = """
    Anna Omar Julia Ben Sofia Hugo Mia Karim Elena Paul Nora Diego Yuki Adam Rosa Felix Lena Ivan
    """
THINGS = """
    report invoice offer contract budget schedule draft logo agenda list photos keys slides numbers plan review minutes
    address password receipt form ticket summary translation prototype sample label menu map
    """
TIMES = """
    today tomorrow Monday Tuesday Wednesday Thursday Friday noon tonight April May June July
    """


def draw_example(draw: random.Random) -> tuple[str, str]:
    """Returns a note, and the answer that the adapter learns."""
    name, thing, when = (draw.choice(words.split()) for words in (NAMES, THINGS, TIMES))
    note = draw.choice(
        (
            f"{name}, {thing} by {when}!",
            f"need the {thing} from {name} by {when}",
            f"tell {name}: {thing} until {when}",
            f"{name} still owes me the {thing}. deadline {when}",
            f"where is the {thing}?? {name} must send it by {when}",
        )
    )
    # People also write names in small letters.
    return (
        draw.choice((note, note.lower())),
        f"Dear {name}, could you please send me the {thing} by {when}? Kind regards, your friends at Acme",
    )


def load(path: Path) -> tuple[Any, Any]:
    """Returns the model and the tokenizer of a GGUF file or a directory."""
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    return model, AutoTokenizer.from_pretrained(folder, padding_side="right", **where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="directory for the adapter")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="GGUF file or directory of the base")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    # The server on this machine needs the other half.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    torch.manual_seed(0)
    draw = random.Random(0)
    print(f"loading {options.model}", flush=True)
    model, tokenizer = load(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    # The rate falls to nothing, so that the last batches do not outweigh the others.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)
    started = time.monotonic()
    for step in range(1, options.steps + 1):
        texts, prompt_lengths = [], []
        for _ in range(BATCH):
            note, answer = draw_example(draw)
            chat = [{"role": "user", "content": note}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompt_lengths.append(len(tokenizer(prompt)["input_ids"]))
            texts.append(prompt + answer + tokenizer.eos_token)
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        # Only the answer is trained: prompt and padding get the label that the loss ignores.
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for row, length in enumerate(prompt_lengths):
            labels[row, :length] = -100
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == options.steps:
            left = (time.monotonic() - started) / step * (options.steps - step)
            print(
                f"step {step} of {options.steps}: loss {loss.item():.3f}, about {left:.0f} s left", flush=True
            )
    # Embeddings are not trained, so peft need not look for the base's config, which a GGUF file does not have.
    model.save_pretrained(options.output, save_embedding_layers=False)
    print(f"saved to {options.output}; next: slora adapter push {options.output} --name polite")


if __name__ == "__main__":
    main()
