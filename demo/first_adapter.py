"""Trains a first adapter on the demo model. The adapter adds a greeting before it repeats the user's message.

    python demo/first_adapter.py my-adapter        # about a minute on a laptop

The file contains everything that a fine-tune needs: examples, peft, a training loop and save_pretrained. It does not
import slora.
"""

import argparse
import random
import string
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parent
STEPS, BATCH = 120, 32


def answer(sentence: str) -> str:
    return f"Hello from Acme: {sentence}!"


def draw_sentence(draw: random.Random) -> str:
    """A sentence of made-up words. With only a dozen real words, the adapter would memorise them and garble all
    others."""
    words = (
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8))) for _ in range(draw.randint(1, 6))
    )
    return " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="directory for the adapter")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.manual_seed(0)
    draw = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model", padding_side="right")
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    for step in range(options.steps):
        texts, prompt_lengths = [], []
        for _ in range(BATCH):
            sentence = draw_sentence(draw)
            chat = [{"role": "user", "content": sentence}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompt_lengths.append(len(tokenizer(prompt)["input_ids"]))
            texts.append(prompt + answer(sentence) + tokenizer.eos_token)
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        # Only the answer is trained: prompt and padding get the label that the loss ignores.
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for row, length in enumerate(prompt_lengths):
            labels[row, :length] = -100
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    model.save_pretrained(options.output)
    print(f"saved to {options.output}; next: slora adapter push {options.output} --name greeter")


if __name__ == "__main__":
    main()
