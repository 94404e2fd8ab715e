"""What rounding the base model's weights costs: the distributions of the next token, and right answers.

    python -m bench.quality --quantizations int8 int4 [--model FILE.gguf] [--examples 20]

The examples are those that the demo's adapters have not seen (`demo.evaluate`), each with its task's adapter. The
numbers of a GGUF file are decoded first. KL is the mean over all tokens of prompt and wanted answer, in nats, from the
distribution without rounding. `changed` is the share of tokens with another most likely next token. Answers are greedy.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.table import Row, print_table
from demo.evaluate import DIRECTORY, MAX_NEW_TOKENS, draw_held_out, render
from demo.first_adapter import REAL_MODEL, load
from demo.tasks import TASKS
from slora import LLM, SamplingParams
from slora.models.decoder import Decoder
from slora.models.model_spec import find_model


@contextmanager
def kept_logits() -> Iterator[list[Tensor]]:
    """The results of `Decoder.logits`."""
    kept: list[Tensor] = []
    original = Decoder.logits

    def logits(self: Decoder, *args: Any) -> Tensor:
        kept.append(original(self, *args))
        return kept[-1]

    Decoder.logits = logits  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        Decoder.logits = original  # type: ignore[method-assign]


def score(llm: LLM, tokens: Sequence[int], adapter: Path) -> Tensor:
    """The log-probabilities of all tokens after each token of a text."""
    with kept_logits() as kept:
        llm.generate([list(tokens)], SamplingParams(max_tokens=1, prompt_logprobs=0), [adapter])
    return torch.cat(kept).float().log_softmax(1)


def measure(llms: dict[str, LLM], model: Path, num_examples: int) -> list[Row]:
    """The first one is what the others are compared with."""
    _, tokenizer = load(model)
    sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    right: defaultdict[str, dict[str, int]] = defaultdict(dict)
    greedy = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0.0)
    for name, task in TASKS.items():
        examples, adapter = draw_held_out(task, num_examples), DIRECTORY / name
        prompts = [tokenizer(render(tokenizer, task, example))["input_ids"] for example in examples]
        for form, llm in llms.items():
            answers = llm.generate(prompts, greedy, [adapter] * len(prompts))
            right[form][name] = sum(map(task.is_right, examples, (answer.text for answer in answers)))
        for example, prompt in zip(examples, prompts, strict=True):
            text = [*prompt, *tokenizer(example.answer, add_special_tokens=False)["input_ids"]]
            exact: Tensor | None = None
            for form, llm in llms.items():
                own = score(llm, text, adapter)
                exact = own if exact is None else exact
                kl = (exact.exp() * (exact - own)).sum(1)
                changed = exact.argmax(1) != own.argmax(1)
                sums[form] += torch.stack((kl.double().sum(), changed.double().sum(), torch.tensor(len(kl))))
    return [
        {
            "weights": form,
            "KL": float(sums[form][0] / sums[form][2]),
            "changed %": float(100 * sums[form][1] / sums[form][2]),
            "tokens": int(sums[form][2]),
            **right[form],
            "all": sum(right[form].values()),
        }
        for form in llms
    ]


def decode_model(file: Path, directory: Path, dtype: torch.dtype) -> None:
    """Writes the model of a GGUF file with plain weights."""
    model, tokenizer = load(file)
    model.config.__dict__.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quantizations", nargs="+", default=["int8", "int4"])
    parser.add_argument("--model", type=Path, default=REAL_MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--examples", type=int, default=20)
    options = parser.parse_args()
    settings = {"pool_bytes": 256 << 20, "swap_bytes": 0, "prefix_cache": "off", "dtype": options.dtype}
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        weights = options.model
        if weights.suffix == ".gguf":
            # `int4` would keep the numbers of a file in 4 bits.
            weights = Path(directory)
            decode_model(options.model, weights, getattr(torch, options.dtype))
        llms = {
            form: LLM(find_model(weights), quantization=form, **settings)
            for form in ("auto", *options.quantizations)
        }
        title = f"{options.model.name} in {options.dtype}, {options.examples} examples of each task"
        print_table(title, measure(llms, options.model, options.examples))


if __name__ == "__main__":
    main()
