"""What `cold_adapters` simulates, measured: the engine on this machine, in real time, with the model of 110M.

The bytes of an adapter lie packed in memory and are handed over when they would have come from afar; copying them to
the pool, and all else that a step does, is the real thing.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.cold_adapters import COLD_EVERY_S, FAR, NUM_DECODING, NUM_WARM
from bench.paced_source import PacedSource
from bench.simulation.request_log import percentile
from bench.table import Row
from bench.workload import RANKS, prompts, write_adapter, write_model
from slora.core.engine_config import EngineConfig
from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.models.model_spec import read_model_spec
from slora_adapters.loader.source import DirectorySource
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.version import AdapterVersion

ALONE, BESIDE_COLD, BESIDE_BASE = "alone", "cold", "base"
POOL_BYTES = 1 << 30


def live_cold_rows(output_tokens: int, rounds: int) -> list[Row]:
    """Medians of rounds, the three cases in turn."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(model, torch.bfloat16)
        adapters = [Path(directory) / str(index) for index in range(len(RANKS))]
        for index, path in enumerate(adapters):
            write_adapter(path, index, torch.bfloat16)
        measured: dict[str, list[list[float]]] = {ALONE: [], BESIDE_COLD: [], BESIDE_BASE: []}
        for _ in range(rounds):
            seconds = 0.0
            for case, found in measured.items():
                run = _Run(model, adapters, output_tokens, case, seconds)
                found.append(run.gaps())
                seconds = seconds or run.seconds
    p50, p99 = (
        {
            case: statistics.median(1e3 * percentile(gaps, percent) for gaps in found)
            for case, found in measured.items()
        }
        for percent in (50, 99)
    )
    ratios = [
        percentile(cold, 99) / percentile(alone, 99)
        for cold, alone in zip(measured[BESIDE_COLD], measured[ALONE], strict=True)
    ]
    return [
        {
            "machine": "this one, 110M",
            "decoding": NUM_DECODING,
            "alone p50 ms": p50[ALONE],
            "p99 ms": p99[ALONE],
            "beside cold p50 ms": p50[BESIDE_COLD],
            "cold p99 ms": p99[BESIDE_COLD],
            "over alone": statistics.median(ratios),
            "beside base p99 ms": p99[BESIDE_BASE],
        }
    ]


class _Run:
    """One engine and one case. others_s: for how long others come; seconds: how long those who decode took."""

    def __init__(
        self, model: Path, adapters: list[Path], output_tokens: int, case: str, others_s: float
    ) -> None:
        spec = read_model_spec(model)
        shape = spec.shape("bfloat16")
        self._source = DirectorySource(shape, "bfloat16", num_threads=0)
        self._read = [read_adapter(path, shape, self._source.limits) for path in adapters]
        config = EngineConfig(model, dtype="bfloat16", pool_bytes=POOL_BYTES, prefix_cache="off")
        self._engine = Engine(config, spec, PacedSource(self._source, FAR))
        self._output_tokens = output_tokens
        num_others = 0 if case == ALONE else int(others_s / COLD_EVERY_S)
        self._others = [self._other(number, adapted=case == BESIDE_COLD) for number in range(num_others)]
        self.seconds = 0.0

    def gaps(self) -> list[float]:
        """Seconds between two tokens of those who decode all the time, in order of size."""
        decoding = {f"decoding-{number}" for number in range(NUM_DECODING)}
        versions = [self._version(number) for number in range(NUM_WARM)]
        for number, (name, prompt) in enumerate(
            zip(sorted(decoding), prompts(NUM_DECODING, 64), strict=True)
        ):
            self._engine.add(_request(name, prompt, versions[number % NUM_WARM], self._output_tokens))
        begun: set[str] = set()
        while len(begun) < NUM_DECODING:
            begun |= {output.request_id for output in self._engine.step()}
        start = last = time.perf_counter()
        found, left = [], set(decoding)
        others = self._arrivals(start)
        while left:
            for request in next(others):
                self._engine.add(request)
            outputs = self._engine.step()
            now = time.perf_counter()
            mine = [output for output in outputs if output.request_id in decoding]
            found += [now - last] * len(mine)
            if mine:
                last = now
            left -= {one.request_id for one in mine if one.delta is not None and one.delta.finish_reason}
        self.seconds = time.perf_counter() - start
        return sorted(found)

    def _arrivals(self, start: float) -> Iterator[list[EngineRequest]]:
        """Of each moment that it is asked in, who has come since."""
        done = 0
        while True:
            due = min(len(self._others), int((time.perf_counter() - start) / COLD_EVERY_S))
            yield self._others[done:due]
            done = due

    def _version(self, number: int) -> AdapterVersion:
        """The same weights of another tenant are another adapter."""
        return self._source.hold(self._read[number % len(self._read)], tenant=f"tenant-{number}")

    def _other(self, number: int, *, adapted: bool) -> EngineRequest:
        version = self._version(NUM_WARM + number) if adapted else None
        return _request(f"other-{number}", prompts(1, 8)[0], version, 4)


def _request(
    name: str, prompt: list[int], version: AdapterVersion | None, output_tokens: int
) -> EngineRequest:
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(
        name, version.tenant if version else "others", prompt, single_adapter(version), params
    )
