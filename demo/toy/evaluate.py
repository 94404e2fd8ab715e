"""Evaluate the demo model with plain transformers and peft: exact answers to unseen sentences, in fp32 and bf16.

    python -m demo.toy.evaluate                   # 500 sentences for the base and each adapter
    python -m demo.toy.evaluate --instructions    # also the base with a system message for each task

Decoding is greedy. An answer counts only if every character is right. This module does not import the training code or
slora, so its figures hold for any software that runs the same files.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from demo.toy.tasks import ADAPTERS, TASKS, unseen_sentences

__all__ = ["Row", "answer", "main", "measure"]

MAX_NEW_TOKENS = 160
BATCH_SIZE = 250
SHOWN_SENTENCE = "the quick brown fox"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Subject:
    """One subject of the evaluation: a task, and the adapter or the system message that asks for it."""

    title: str
    task: str
    adapter: str | None
    system: str


@dataclass(frozen=True, slots=True)
class Row:
    """Results for one subject: the share of exact answers for each dtype, and one sample answer."""

    title: str
    exact: dict[str, float]
    shown: str


def render(tokenizer: PreTrainedTokenizerFast, sentence: str, system: str) -> str:
    """The prompt for `sentence`, rendered with the model's own chat template."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": sentence})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@torch.inference_mode()
def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, sentences: Sequence[str], system: str
) -> list[str]:
    """Return the greedy answer to each sentence, at most MAX_NEW_TOKENS tokens long."""
    answers: list[str] = []
    for start in range(0, len(sentences), BATCH_SIZE):
        prompts = [render(tokenizer, sentence, system) for sentence in sentences[start : start + BATCH_SIZE]]
        encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        generated = model.generate(**encoded, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers += tokenizer.batch_decode(
            generated[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return answers


def load(directory: Path, adapter: str | None, dtype: torch.dtype) -> PreTrainedModel:
    """Load the base, with one adapter or none, all weights in `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=dtype)
    if adapter is not None:
        # By default, peft would keep the adapter in fp32 beside a bf16 base.
        model = PeftModel.from_pretrained(
            model, directory / "adapters" / adapter, autocast_adapter_dtype=False
        )
    return model.eval()


def subjects(adapters: Sequence[str], *, instructions: bool) -> list[Subject]:
    """List the subjects of the evaluation, the base first."""
    found = [Subject("base", "echo", None, "")]
    if instructions:
        found += [Subject(f"base, system: {name}", name, None, name) for name in TASKS if name != "echo"]
    return found + [Subject(name, ADAPTERS[name].task, name, "") for name in adapters]


def measure(directory: Path, measured: Sequence[Subject], sentences: Sequence[str]) -> Iterator[Row]:
    """Yield one row for each subject. `directory` holds model/ and adapters/."""
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    for subject in measured:
        wanted = [TASKS[subject.task].apply(sentence) for sentence in sentences]
        exact: dict[str, float] = {}
        shown = ""
        for dtype_name, dtype in DTYPES.items():
            model = load(directory, subject.adapter, dtype)
            given = answer(model, tokenizer, sentences, subject.system)
            exact[dtype_name] = sum(g == w for g, w in zip(given, wanted, strict=True)) / len(sentences)
            shown = shown or answer(model, tokenizer, [SHOWN_SENTENCE], subject.system)[0]
        yield Row(subject.title, exact, shown)


def main() -> None:
    """Print the results as one table."""
    parser = argparse.ArgumentParser(description="Counts the demo's exact answers to unseen sentences.")
    parser.add_argument(
        "--directory", type=Path, default=Path(__file__).parents[1], help="holds model/ and adapters/"
    )
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--instructions", action="store_true", help="also measure the base model on every task"
    )
    parser.add_argument("--adapters", nargs="*", choices=list(ADAPTERS), default=list(ADAPTERS))
    options = parser.parse_args()
    logging.disable_progress_bar()  # the table has its own progress bar
    measured = subjects(options.adapters, instructions=options.instructions)
    sentences = unseen_sentences(options.sentences, options.seed)
    rows = list(tqdm(measure(options.directory, measured, sentences), total=len(measured), unit="row"))
    print(f"{'':24}{''.join(f'{name:>8}' for name in DTYPES)}  {SHOWN_SENTENCE!r} becomes")
    for row in rows:
        print(f"{row.title:24}{''.join(f'{row.exact[name]:8.1%}' for name in DTYPES)}  {row.shown}")


if __name__ == "__main__":
    main()
