"""Prompt lookup against decoding one by one, on a text that repeats itself and on one that does not.

    python -m bench.prompt_lookup

Both engines have the model of 110 million random weights in bf16 and take turns within one process, so that whatever
slows the machine down slows both. Its greedy answers soon repeat themselves, as an answer does that copies from its
prompt: this is the workload `copies`. At temperature 1 its answers are random tokens, the workload `random`.

Both engines must give the same tokens.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.bars import Bar
from bench.parts import Tables, run_parts
from bench.stepped_engine import SteppedEngine
from bench.table import Row
from bench.workload import prompts, write_model
from slora_adapters.process.progress_bar import track_progress

_INPUT_TOKENS, _OUTPUT_TOKENS = 64, 256
_MAX_DRAFT_TOKENS = 15
_TEMPERATURES = {"copies": 0.0, "random": 1.0}
BARS = (
    Bar("copies, one request", lambda row: (row["text"], row["batch"]) == ("copies", 1), "ratio", 1.5),
    Bar("random", lambda row: row["text"] == "random", "ratio", 0.97),
    Bar("wrong tokens", lambda row: True, "wrong tokens", 0.0, at_most=True),
)


def lookup_rows(*, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        model = Path(directory) / "model"
        write_model(model, torch.bfloat16)
        settings = {"dtype": "bfloat16", "pool_bytes": 1 << 30, "swap_bytes": 0}
        plain = SteppedEngine(model, [], settings)
        drafting = SteppedEngine(model, [], {**settings, "prompt_lookup_tokens": _MAX_DRAFT_TOKENS})
    rounds = 1 if quick else 7
    batches = (1,) if quick else (1, 8)
    return [
        {
            "text": text,
            "batch": batch,
            **compare_answers(plain, drafting, prompts(batch, _INPUT_TOKENS), temperature, rounds),
        }
        for text, temperature in _TEMPERATURES.items()
        for batch in batches
    ]


def compare_answers(
    plain: SteppedEngine, drafting: SteppedEngine, asked: Sequence[list[int]], temperature: float, rounds: int
) -> Row:
    batch, num_wrong = len(asked), 0
    rates: dict[str, list[float]] = {"plain": [], "drafting": []}
    for number in track_progress("Rounds", range(rounds + 1), "round"):  # the first round warms up
        plain_s, expected = _answer(plain, asked, temperature)
        drafting_s, answers = _answer(drafting, asked, temperature)
        for mine, right in zip(answers, expected, strict=True):
            num_wrong += sum(one != other for one, other in zip(mine, right, strict=True))
        if number:
            rates["plain"].append(batch * _OUTPUT_TOKENS / plain_s)
            rates["drafting"].append(batch * _OUTPUT_TOKENS / drafting_s)
    ratios = [one / other for one, other in zip(rates["drafting"], rates["plain"], strict=True)]
    return {
        "plain tokens/s": statistics.median(rates["plain"]),
        "drafting tokens/s": statistics.median(rates["drafting"]),
        "ratio": statistics.median(ratios),
        "worst": min(ratios),
        "wrong tokens": num_wrong,
    }


def _answer(
    stepped: SteppedEngine, asked: Sequence[list[int]], temperature: float
) -> tuple[float, list[list[int]]]:
    """Returns the seconds and the answers to all prompts at once."""
    names = stepped.add(asked, [()] * len(asked), _OUTPUT_TOKENS, temperature)
    answers: dict[str, list[int]] = {name: [] for name in names}
    began = time.perf_counter()
    while stepped.engine.num_unfinished:
        for output in stepped.step():
            assert output.delta is not None, "a request that failed raises"
            answers[output.request_id] += output.delta.token_ids
    return time.perf_counter() - began, list(answers.values())


def make_tables(*, quick: bool) -> Tables:
    rows = lookup_rows(quick=quick)
    verdicts = [verdict for bar in BARS for verdict in bar.verdicts(rows)]
    return {"Tokens/s with and without prompt lookup": rows, "Bars": verdicts}


if __name__ == "__main__":
    assert __doc__ is not None
    run_parts(__doc__, {"lookup": make_tables})
