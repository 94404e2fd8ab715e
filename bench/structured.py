"""What structured output costs: tokens per second of a batch, the parts of a step, and the time to the first token.

    GOMP_SPINCOUNT=10000 python -m bench.structured [--parts parts first-token batch] [--quick] [--json FILE]

The model of 110M parameters (`bench.workload`) gets a tokenizer of 32,000 tokens, trained on this repository's sources.
The random model never ends an answer by itself, and each schema demands more than an answer's 64 tokens.

batch        64 requests, without a form and with 64 different schemas, in turn. Bar: 0.85 of the tokens per second. The
             first round, which compiles the schemas, does not count.
parts        milliseconds in a step of this batch: computing the masks, applying them, advancing the matchers.
first-token  over HTTP, one request at a time: without a form, with a schema seen before, and with one never seen. Bar:
             30 ms later than without.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.bars import Bar
from bench.parts import Tables, run_parts
from bench.sse_client import SseClient
from bench.table import Row
from bench.workload import SMALL, prompts, write_model
from slora.core.engine_config import EngineConfig
from slora.core.request import EngineRequest
from slora.core.sampling_params import SamplingParams, StructuredOutput
from slora.engine.engine import Engine
from slora.grammar.lark_grammar import GrammarLibrary
from slora.models.model_spec import read_model_spec
from slora.text.tokenizer import Tokenizer as TextTokenizer
from slora_adapters.loader.source import DirectorySource
from slora_adapters.process.progress_bar import track_progress
from slora_kernels.torch.token_sampling import mask_logits
from tests.api.served import serving

BATCH, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64, 64
EOS = 2
_ROUNDS, _THREADS = 5, 2
_PLAIN, _SEEN, _NEW = "without a form", "a schema seen before", "a schema never seen"
_BARS = (
    Bar("tokens/s of without, temperature 0", lambda row: row.get("temperature") == 0.0, "ratio", 0.85),
    Bar("tokens/s of without, temperature 1", lambda row: row.get("temperature") == 1.0, "ratio", 0.85),
    Bar(f"first token, {_SEEN}", lambda row: row.get("request") == _SEEN, "later by ms", 30.0, at_most=True),
    Bar(f"first token, {_NEW}", lambda row: row.get("request") == _NEW, "later by ms", 30.0, at_most=True),
)
_SOURCES = ("slora", "kernels", "adapters", "api", "tests", "bench", "docs")


def make_schema(number: int) -> dict[str, object]:
    """A list of at least 200 records with up to six fields. Each number gives other fields."""
    fields: list[dict[str, object]] = [
        {"type": "integer", "minimum": number, "maximum": 10_000 + number},
        {"enum": [f"state {number + other}" for other in range(5)]},
        {"type": "string", "maxLength": 20 + number % 50},
        {"type": "array", "items": {"type": "number"}, "maxItems": 3},
        {"type": "string", "format": "date-time"},
        {"anyOf": [{"type": "null"}, {"type": "string", "pattern": f"^[A-Z]{{2}}-{number}[0-9]{{1,6}}$"}]},
    ]
    names = [f"field_{number}_{place}" for place in range(2 + number % 5)]
    record = {
        "type": "object",
        "properties": {name: fields[(number + place) % 6] for place, name in enumerate(names)},
        "required": names,
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": 200}


def write_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SMALL.vocab,
        min_frequency=1,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    root = Path(__file__).parent.parent
    files = [str(path) for name in _SOURCES for path in sorted((root / name).rglob("*.[pm][yd]"))]
    tokenizer.train(files, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


class Batches:
    """One engine, and batches of 64 requests with and without forms."""

    def __init__(self, model: Path) -> None:
        config = EngineConfig(model, pool_bytes=1 << 30, swap_bytes=0, prefix_cache="off")
        spec = read_model_spec(model)
        dtype = spec.resolve_dtype(config.dtype)
        self._engine = Engine(config, spec, DirectorySource(spec.shape(dtype), dtype, num_threads=0))
        self._prompts = prompts(BATCH, PROMPT_TOKENS)
        self._num_rounds = 0

    def measure(self, temperature: float, schemas: list[dict[str, object]] | None) -> float:
        """Returns tokens per second."""
        self._num_rounds += 1
        started = time.perf_counter()
        for number, prompt in enumerate(self._prompts):
            output = None if schemas is None else StructuredOutput.json_schema(schemas[number])
            params = SamplingParams(
                max_tokens=OUTPUT_TOKENS,
                temperature=temperature,
                seed=number,
                structured_output=output,
                ignore_eos=output is None,
            )
            name = f"{self._num_rounds}/{number}"
            self._engine.add(EngineRequest(name, "bench", prompt, (), params))
        num_tokens = 0
        while self._engine.num_unfinished:
            for step_output in self._engine.step():
                if step_output.error is not None:
                    raise step_output.error
                num_tokens += 1
        assert num_tokens == BATCH * OUTPUT_TOKENS, f"{num_tokens} tokens: an answer ended early"
        return num_tokens / (time.perf_counter() - started)


def batch_rows(model: Path, rounds: int) -> Iterator[Row]:
    batches = Batches(model)
    schemas = [make_schema(number) for number in range(BATCH)]
    batches.measure(0.0, None), batches.measure(0.0, schemas)
    for temperature in (0.0, 1.0):
        plain, formed = [], []
        for _ in track_progress("Rounds", range(rounds), "round"):
            plain.append(batches.measure(temperature, None))
            formed.append(batches.measure(temperature, schemas))
        ratios = [with_form / without for with_form, without in zip(formed, plain, strict=True)]
        yield {
            "temperature": temperature,
            "tokens/s without": statistics.median(plain),
            "tokens/s with 64 schemas": statistics.median(formed),
            "ratio": statistics.median(ratios),
            "worst ratio": min(ratios),
        }


def part_rows(model: Path, num_steps: int) -> Iterator[Row]:
    library = GrammarLibrary(TextTokenizer.from_directory(model).spell_vocabulary(SMALL.vocab), [EOS])
    started = time.perf_counter()
    grammars = [library.compile(StructuredOutput.json_schema(make_schema(number))) for number in range(BATCH)]
    yield {
        "part": "compile one schema",
        "median ms": (time.perf_counter() - started) * 1e3 / BATCH,
        "worst ms": None,
    }
    matchers = [grammar.start({EOS}) for grammar in grammars]
    words = np.zeros((BATCH, SMALL.vocab // 32), np.int32)
    logits, rows = torch.randn(BATCH, SMALL.vocab, dtype=torch.bfloat16), torch.arange(BATCH)
    times: dict[str, list[float]] = {"compute 64 masks": [], "apply 64 masks": [], "advance 64 matchers": []}

    def timed(part: str, work: Callable[[], None]) -> None:
        begin = time.perf_counter()
        work()
        times[part].append((time.perf_counter() - begin) * 1e3)

    for _ in range(num_steps):
        timed(
            "compute 64 masks",
            lambda: [one.write_mask(words[row]) for row, one in enumerate(matchers)] and None,
        )
        masked = logits.clone()
        timed("apply 64 masks", lambda masked=masked: mask_logits(masked, rows, torch.from_numpy(words)))
        tokens = masked.float().argmax(-1).tolist()
        timed(
            "advance 64 matchers",
            lambda tokens=tokens: (
                [one.accept(token) for one, token in zip(matchers, tokens, strict=True)] and None
            ),
        )
    for part, found in times.items():
        yield {"part": part, "median ms": statistics.median(found), "worst ms": max(found)}


def first_token_rows(model: Path, folder: Path, count: int) -> Iterator[Row]:
    with serving(model, folder / "data", "--pool-bytes", "256MiB", kernels="auto") as served:
        served.wait_until_ready()
        seconds = asyncio.run(_measure_first_tokens(served.url, served.make_key("bench"), count))
    plain = statistics.median(seconds[_PLAIN])
    for kind, found in seconds.items():
        yield {
            "request": kind,
            "median ms": statistics.median(found) * 1e3,
            "p90 ms": sorted(found)[int(0.9 * len(found))] * 1e3,
            "later by ms": (statistics.median(found) - plain) * 1e3,
        }


async def _measure_first_tokens(url: str, key: str, count: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {_PLAIN: [], _SEEN: [], _NEW: []}
    prompt = prompts(1, PROMPT_TOKENS)[0]
    async with SseClient(url) as client:
        # The first rounds start the process that checks forms.
        for number in track_progress("Rounds", range(-2, count), "round"):
            forms = {_PLAIN: {}, _SEEN: {"guided_json": make_schema(0)}}
            forms[_NEW] = {"guided_json": make_schema(1000 + number)}
            for kind, form in forms.items():
                body = {"model": "model", "prompt": prompt, "max_tokens": 2, **form}
                answer = await client.complete(key, body)
                assert answer.is_complete, answer.error
                if number >= 0:
                    seconds[kind].append(answer.chunks_at[0] - answer.sent_at)
    return seconds


def batch_tables(*, quick: bool) -> Tables:
    with _bench_model() as folder:
        rows = list(batch_rows(folder / "model", 1 if quick else _ROUNDS))
    return {"batch": rows, "bars of the batch": _verdicts(rows)}


def part_tables(*, quick: bool) -> Tables:
    with _bench_model() as folder:
        return {"parts": list(part_rows(folder / "model", 20 if quick else 200))}


def first_token_tables(*, quick: bool) -> Tables:
    with _bench_model() as folder:
        rows = list(first_token_rows(folder / "model", folder, 5 if quick else 40))
    return {"first-token": rows, "bars of the first token": _verdicts(rows)}


def _verdicts(rows: Sequence[Row]) -> list[Row]:
    return [verdict for bar in _BARS for verdict in bar.verdicts(rows)]


@contextmanager
def _bench_model() -> Iterator[Path]:
    """A directory with the model, in `model`."""
    torch.set_num_threads(_THREADS)
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as name:
        folder = Path(name)
        write_model(folder / "model", torch.bfloat16)
        write_tokenizer(folder / "model")
        yield folder


PARTS: Mapping[str, Callable[..., Tables]] = {
    "parts": part_tables,
    "first-token": first_token_tables,
    "batch": batch_tables,
}

if __name__ == "__main__":
    assert __doc__ is not None
    run_parts(__doc__, PARTS)
