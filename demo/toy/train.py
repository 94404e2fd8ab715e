"""Train the demo on generated data: one small Llama that knows every task, and one LoRA adapter for each task.

    python -m demo.toy.train                      # writes demo/model and demo/adapters
    python -m demo.toy.train --reuse-base         # keeps demo/model, trains the adapters again

The base is trained on all tasks at once, and the system message selects the task. The base therefore already has the
features that each task needs. An adapter only has to change the default task, which applies without a system message.
Rank 2 and a few hundred steps are enough for that. Base matrices are trained with Muon, all other parameters with
AdamW.

If other programs use the same cores, set OMP_WAIT_POLICY=PASSIVE. Otherwise waiting threads spin and starve the thread
that they wait for. On 2 busy cores, the first steps went from about 1 step/s to about 4 steps/s (two short runs).

All random generators are seeded. The accuracy that `demo.toy.evaluate` reports is reproducible, but the exact bits are
not. Another processor or another number of threads rounds sums in a different order.
"""

import argparse
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.toy.conversation import IGNORED, MAX_TOKENS, Batch, Conversation, collate, make_tokenizer
from demo.toy.tasks import ADAPTERS, TASKS, AdapterSpec, training_sentence

__all__ = ["main"]

SEED = 20
BASE_NAME = "slora-demo"
BATCH_SIZE = 64
# So many batches of conversations are sorted by length, then cut. A quarter of their tokens is still padding.
BATCHES_DRAWN_TOGETHER = 16
MAX_WORDS = 7
NUM_CHECKED = 64  # sentences per task for each progress line
# A system message that names no task must change nothing, so a share of the conversations has such a message.
SHARE_OF_IDLE_SYSTEM_MESSAGES = 0.2
# Harder tasks get more training examples.
TASK_WEIGHTS: Mapping[str, float] = {
    "double": 1.5,
    "mirror": 1.5,
    "spell": 1.3,
    "reverse": 1.3,
    "rot13": 1.2,
    "devowel": 1.2,
    "title": 0.8,
    "snake": 0.8,
    "initials": 0.7,
}

# The argument is the maximum number of words in the sentence.
DrawConversation = Callable[[int], Conversation]


@dataclass(frozen=True, slots=True)
class Plan:
    """Length and learning rates of a training run. Rates rise over `warm_up_steps`, then fall along a cosine.

    matrix_learning_rate: Muon's rate for the matrices inside the layers. None trains these with AdamW too.
    curriculum_steps: sentences have one word at first, and one more every `curriculum_steps` / MAX_WORDS steps.
    """

    steps: int
    learning_rate: float
    matrix_learning_rate: float | None
    warm_up_steps: int
    curriculum_steps: int
    report_every: int

    def rate(self, step: int) -> float:
        """The factor on the peak learning rate at `step`: it rises from just above 0 to 1, then falls to 0.01."""
        rising = (step + 1) / self.warm_up_steps
        falling = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))
        return min(rising, falling)

    def max_words(self, step: int) -> int:
        """The maximum number of words in a training sentence at `step`."""
        if step >= self.curriculum_steps:
            return MAX_WORDS
        return 1 + step * MAX_WORDS // self.curriculum_steps


BASE_PLAN = Plan(
    steps=4000,
    learning_rate=2e-3,
    matrix_learning_rate=3e-3,
    warm_up_steps=100,
    curriculum_steps=1000,
    report_every=250,
)
ADAPTER_PLAN = Plan(
    steps=200,
    learning_rate=5e-3,
    matrix_learning_rate=None,
    warm_up_steps=20,
    curriculum_steps=0,
    report_every=100,
)

# Dropping or doubling letters makes neighbouring letters alike and easy to confuse. Without its vowels, a sentence was
# right in 97.8% of cases after 200 steps and in 99.6% after 600. Reversed text differs most from repeating: 88% after
# 200 steps.
ADAPTER_STEPS: Mapping[str, int] = {"devowel": 600, "double": 800, "mirror": 600}


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Create the untrained base: a Llama with 4 layers, 4 query heads on 2 KV heads and 0.86 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # 1.4 to 1.8 times as fast as sdpa at 48 to 144 tokens, on 2 EPYC cores under bf16 autocast.
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    return model


def idle_system_message(rng: random.Random) -> str:
    """Draw a system message that names no task: usually an empty one, otherwise a sentence."""
    return training_sentence(rng, MAX_WORDS) if rng.random() < SHARE_OF_IDLE_SYSTEM_MESSAGES else ""


def base_conversations(rng: random.Random) -> DrawConversation:
    """Conversations on all tasks. The system message names the task. An answer without one repeats the sentence."""
    names = list(TASKS)
    weights = [TASK_WEIGHTS.get(name, 1.0) for name in names]

    def draw(max_words: int) -> Conversation:
        name = rng.choices(names, weights)[0]
        sentence = training_sentence(rng, max_words)
        system = idle_system_message(rng) if name == "echo" else name
        return Conversation(system, sentence, TASKS[name].apply(sentence))

    return draw


def adapter_conversations(task: str, rng: random.Random) -> DrawConversation:
    """Conversations on one task, without a system message that names it."""

    def draw(max_words: int) -> Conversation:
        sentence = training_sentence(rng, max_words)
        return Conversation(idle_system_message(rng), sentence, TASKS[task].apply(sentence))

    return draw


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, draw: DrawConversation, max_words: int, rng: random.Random
) -> list[Batch]:
    """Draw a few batches in random order. Each contains conversations of similar length."""
    drawn = [draw(max_words) for _ in range(BATCH_SIZE * BATCHES_DRAWN_TOGETHER)]
    # The noise varies which tasks end up together in a batch of equal lengths.
    drawn.sort(key=lambda c: len(c.prompt) + len(c.answer) + 6 * rng.random())
    batches = [
        collate(tokenizer, drawn[start : start + BATCH_SIZE]) for start in range(0, len(drawn), BATCH_SIZE)
    ]
    rng.shuffle(batches)
    return batches


def predict(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits at each position, fp32 [B, T, vocabulary], and the next token's label, int64 [B, T]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch.ids, use_cache=False).logits
    return logits.float(), torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORED)


def answer_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The mean cross-entropy of the answer tokens, in nats."""
    logits, labels = predict(model, batch)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def exact_share(model: LlamaForCausalLM, batch: Batch) -> float:
    """The share of answers in which every token is the argmax: the answers that greedy decoding gets right."""
    logits, labels = predict(model, batch)
    return float(((logits.argmax(-1) == labels) | (labels == IGNORED)).all(1).float().mean())


def make_optimizers(model: LlamaForCausalLM, plan: Plan) -> list[torch.optim.Optimizer]:
    """Create Muon for the layers' matrices, if the plan has a rate for it, and AdamW for all other parameters."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim == 2 and ".layers." in name
            (matrices if is_matrix and plan.matrix_learning_rate else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    ]
    if plan.matrix_learning_rate:
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=plan.matrix_learning_rate,
                weight_decay=0.01,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return optimizers


def train(
    model: LlamaForCausalLM,
    plan: Plan,
    title: str,
    next_batch: Callable[[int], Batch],
    checks: Mapping[str, Batch],
) -> None:
    """Train all parameters of `model` that require a gradient, in place. Report loss and exact answers for `checks`.

    next_batch: its argument is the maximum number of words in a sentence.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers = make_optimizers(model, plan)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, plan.rate) for optimizer in optimizers]
    losses: list[float] = []
    with tqdm(total=plan.steps, desc=title, unit="step", dynamic_ncols=True) as progress:
        for step in range(plan.steps):
            loss = answer_loss(model, next_batch(plan.max_words(step)))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            losses.append(loss.item())
            progress.update()
            if (step + 1) % plan.report_every == 0:
                progress.write(report(model, title, step + 1, losses, checks))
                losses.clear()


def report(
    model: LlamaForCausalLM, title: str, step: int, losses: Sequence[float], checks: Mapping[str, Batch]
) -> str:
    """Format one progress line: the mean loss since the previous line, and the exact answers by task, in percent."""
    exact = " ".join(f"{name} {exact_share(model, batch):.0%}" for name, batch in checks.items())
    return f"{title} step {step}: loss {sum(losses) / len(losses):.4f} | {exact}"


def batch_source(
    tokenizer: PreTrainedTokenizerFast, draw: DrawConversation, rng: random.Random
) -> Callable[[int], Batch]:
    """Return a function that returns one batch per call, and draws more batches when none is left."""
    waiting: list[Batch] = []

    def next_batch(max_words: int) -> Batch:
        if not waiting:
            waiting.extend(draw_batches(tokenizer, draw, max_words, rng))
        return waiting.pop()

    return next_batch


def check_batch(tokenizer: PreTrainedTokenizerFast, task: str, system: str) -> Batch:
    """New sentences of `task` from the training distribution. Held-out words are used only by `demo.toy.evaluate`."""
    rng = random.Random(SEED + 1)
    sentences = [training_sentence(rng) for _ in range(NUM_CHECKED)]
    return collate(tokenizer, [Conversation(system, s, TASKS[task].apply(s)) for s in sentences])


def train_base(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Train the base on all tasks and save it with its tokenizer under `directory`."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    model = make_model(tokenizer)
    checks = {name: check_batch(tokenizer, name, "" if name == "echo" else name) for name in TASKS}
    train(model, BASE_PLAN, "base", batch_source(tokenizer, base_conversations(rng), rng), checks)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def lora_config(spec: AdapterSpec) -> LoraConfig:
    """Convert `spec` to a peft config."""
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=BASE_NAME,
        r=spec.r,
        lora_alpha=spec.lora_alpha,
        lora_dropout=0.0,
        target_modules=list(spec.target_modules),
        rank_pattern=dict(spec.rank_pattern),
        alpha_pattern=dict(spec.alpha_pattern),
        use_rslora=spec.use_rslora,
        layers_to_transform=list(spec.layers_to_transform) if spec.layers_to_transform else None,
    )


def train_adapter(
    tokenizer: PreTrainedTokenizerFast, base_directory: Path, spec: AdapterSpec, directory: Path
) -> None:
    """Train one adapter on the saved base and save it under `directory`."""
    torch.manual_seed(SEED)
    rng = random.Random(f"{SEED} {spec.name}")
    model = LlamaForCausalLM.from_pretrained(base_directory, attn_implementation="eager")
    adapted = get_peft_model(model, lora_config(spec))
    # peft names the base by the path from which it was loaded, which means nothing on another machine. peft also keeps
    # the targets as a set, so their order in the saved file would differ from run to run.
    adapted.peft_config["default"].base_model_name_or_path = BASE_NAME
    adapted.peft_config["default"].target_modules = sorted(spec.target_modules)
    checks = {spec.task: check_batch(tokenizer, spec.task, "")}
    source = batch_source(tokenizer, adapter_conversations(spec.task, rng), rng)
    plan = replace(ADAPTER_PLAN, steps=ADAPTER_STEPS.get(spec.name, ADAPTER_PLAN.steps))
    train(model, plan, f"adapter {spec.name}", source, checks)
    adapted.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)  # peft's model card is an unfilled template


def main() -> None:
    """Train the base and the adapters, or only the adapters, into --output."""
    parser = argparse.ArgumentParser(description="Trains the demo's base model and adapters.")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parents[1],
        help="directory to write model/ and adapters/ to",
    )
    parser.add_argument(
        "--reuse-base", action="store_true", help="train only the adapters, on the existing model/"
    )
    parser.add_argument("--adapters", nargs="*", choices=list(ADAPTERS), default=list(ADAPTERS))
    options = parser.parse_args()
    torch.use_deterministic_algorithms(mode=True)
    tokenizer = make_tokenizer()
    base_directory = options.output / "model"
    if not options.reuse_base:
        shutil.rmtree(base_directory, ignore_errors=True)
        train_base(tokenizer, base_directory)
    for name in options.adapters:
        directory = options.output / "adapters" / name
        shutil.rmtree(directory, ignore_errors=True)
        train_adapter(tokenizer, base_directory, ADAPTERS[name], directory)


if __name__ == "__main__":
    main()
