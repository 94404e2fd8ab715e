"""What adapters cost a decode step: some layers of a decoder as one graph, with the LoRA kernels at different places.

    python -m bench.gpu.layer_times FILE [--seconds 60] [--parts layers mixed fp8 timeline]

layers    norm, qkv, rotation, o, norm, gate and up, activation, down: everything but attention. A row is a place, a
          number of adapters and a rank. "over base us" is the time of a layer less that without adapters, "bytes us" is
          what the copy's rate allows for the adapters' bytes.
mixed     the same with the tokens of three prompts beside the decode rows.
fp8       decode attention over KV in fp8, by the tokens of an iteration and the stages of the pipeline.
timeline  the kernels of one layer by the profiler, with registers and shared memory.

Each place and each attention is first compared with torch's kernels on the same input. The places:

base      no adapters.
serial    shrink, matmul, expand on one stream.
beside    shrink beside the matmul, then expand.
apart     shrink and expand beside the matmul. The kernel that reads the output adds the delta.
"""

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bench.gpu.device_time import time_device
from bench.gpu.kernel_times import LLAMA_8B, KernelTimes, Sizes
from bench.gpu.random_adapters import BLOCK_TOKENS, RandomAdapters, cut_evenly
from bench.gpu.resumed_table import ResumedTable
from bench.table import Row, print_table
from slora_kernels.batch import AttentionBatch, AttentionRule, KVGeometry, LoraTiles, TileLimits
from slora_kernels.gpu import paged_attention_decode
from slora_kernels.gpu.launch import Launch
from slora_kernels.gpu.lora_sizes import (
    ExpandTile,
    LoraSizes,
    RowSizes,
    ShrinkSizes,
    ShrinkTile,
    load_sizes,
    name_architecture,
)
from slora_kernels.gpu.triton_kernels import TritonKernels
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels

Case = tuple[Row, Callable[[], Row]]
PARTS = ("layers", "mixed", "fp8", "timeline")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the LoRA kernels of a site run.

    apart: the sites at which they run apart. shrink: replaces splits, block_rank, block_segments, num_warps and
    num_stages of shrink. expand: replaces block_segments and num_warps of expand for prompts. rows: replaces
    block_rank, block_segments and num_warps of expand for decode rows.
    """

    name: str
    apart: tuple[str, ...] = ()
    is_serial: bool = False
    shrink: tuple[int, int, int, int, int] | None = None
    expand: tuple[int, int] | None = None
    rows: tuple[int, int, int] | None = None


SITES = ("qkv", "o", "gate_up", "down")
BASE = Place("base")
_ROWS = ((16, 1, 1), (16, 1, 2), (16, 2, 1), (16, 2, 2), (16, 4, 1), (16, 4, 4), (8, 4, 2), (16, 8, 4))
PLACES = (
    Place("serial", is_serial=True),
    Place("apart", SITES),
    *(Place(f"apart, rows {'x'.join(map(str, sizes))}", SITES, rows=sizes) for sizes in _ROWS),
)
MIXED_PLACES = (
    Place("serial", is_serial=True),
    Place("beside"),
    Place("apart", SITES),
    Place("apart, wide only", ("qkv", "gate_up")),
    Place("apart, rows 16x2x1", SITES, rows=(16, 2, 1)),
    Place("apart, expand 2x8", SITES, expand=(2, 8)),
    Place("apart, shrink 16x2, 3 stages", SITES, shrink=(8, 16, 2, 2, 3)),
    Place("apart, shrink 16x1, 4 stages", SITES, shrink=(8, 16, 1, 2, 4)),
    Place("apart, shrink 32x1, 3 stages", SITES, shrink=(8, 32, 1, 2, 3)),
)
# Adapters and their rank.
LOADS = ((8, 16), (64, 16))
MIXED_LOADS = ((8, 16),)
# Prompt tokens in a mixed step, and how many prompts they belong to.
CHUNK_TOKENS, NUM_PROMPTS = 386, 3
# Batch and context.
ATTENTIONS = ((32, 4096), (64, 4096), (64, 1024))


class Layers:
    """Some layers of a decoder without attention, and adapters on all their linears. Calls take the layers in turn."""

    def __init__(
        self, sizes: Sizes, batch: int, chunk: int, num_adapters: int, rank: int, device: torch.device
    ) -> None:
        shape, dtype = sizes.shape, sizes.dtype
        self.shape, self.device = shape, device
        self.expected: Tensor | None = None
        self.serial: Tensor | None = None
        self._scene = RandomAdapters.make(shape, dtype, (rank,), max(num_adapters, 1), device)
        self._num_adapters, self._batch, self._chunk = num_adapters, batch, chunk
        self.geometry = sizes.geometry(KVFormat.MODEL)

        def draw(*numbers: int) -> Tensor:
            return (torch.randn(*numbers, device=device) * numbers[-1] ** -0.5).to(dtype)

        self._weights = [
            [draw(sum(site.widths), site.in_width) for site in shape.layer_sites(layer)]
            for layer in range(shape.num_layers)
        ]
        self._norm = torch.ones(shape.hidden_size, dtype=dtype, device=device)
        self._angles = torch.rand(BLOCK_TOKENS, shape.head_dim, device=device)
        num_tokens = batch + chunk
        self._first = torch.randn(num_tokens, shape.hidden_size, device=device).to(dtype)
        self._pages = torch.zeros(
            num_tokens, _kv_bytes(self.geometry, BLOCK_TOKENS), dtype=torch.uint8, device=device
        )
        slots = torch.arange(num_tokens, device=device)
        self._attention = AttentionBatch(
            query_starts=torch.arange(num_tokens + 1, dtype=torch.int32, device=device),
            context_lens=torch.ones(num_tokens, dtype=torch.int32, device=device),
            block_tables=slots.int()[:, None],
            positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            kv_slots=slots * BLOCK_TOKENS,
            max_query_len=1,
            max_context_len=1,
        )
        self._deltas = {
            sum(site.widths): torch.zeros(num_tokens, sum(site.widths), dtype=dtype, device=device)
            for site in shape.sites[:-2]
        }

    @property
    def adapter_bytes(self) -> float:
        """Of one layer of all adapters."""
        layout = self._scene.layouts[0]
        return self._num_adapters * layout.num_bytes / self.shape.num_layers

    def bind(self, place: Place, kernels: Kernels) -> Callable[[], Tensor]:
        """The work of all layers. Returns the last residual."""
        scene, device = self._scene, self.device
        step = kernels.prepare_lora(self._cut(kernels.tile_limits), scene.tables)
        attention = kernels.prepare_attention(self._attention)
        lane = _SideLane(device) if device.type == "cuda" else None

        def beside(x: Tensor, name: str, site: LoraSite) -> Tensor:
            shrunk = kernels.shrink(x, scene.pages, site, step)
            if name not in place.apart:
                return cast(Tensor, shrunk)
            delta = self._deltas[sum(site.widths)]
            kernels.write_delta(delta, shrunk, scene.pages, site, step)
            return delta

        def apply(x: Tensor, name: str, weight: Tensor, site: LoraSite) -> tuple[Tensor, Tensor | None]:
            if place == BASE:
                return x @ weight.T, None
            if place.is_serial or lane is None:
                out, result = x @ weight.T, beside(x, name, site)
            else:
                with lane.fork():
                    result = beside(x, name, site)
                out = x @ weight.T
                lane.join()
            if name in place.apart:
                return out, result
            kernels.expand(out, result, scene.pages, site, step)
            return out, None

        def run() -> Tensor:
            residual, out, delta = torch.zeros_like(self._first), self._first, None
            for layer, weights in enumerate(self._weights):
                qkv, o, gate_up, down = zip(SITES, weights, self.shape.layer_sites(layer), strict=True)
                hidden = kernels.add_rms_norm(out, residual, self._norm, 1e-5, delta)
                out, delta = apply(hidden, *qkv)
                heads = kernels.rotate_and_write_kv(
                    out, self._angles, self._pages, self.geometry, layer, attention, None, delta
                )
                out, delta = apply(heads.reshape(len(heads), -1), *o)
                hidden = kernels.add_rms_norm(out, residual, self._norm, 1e-5, delta)
                out, delta = apply(hidden, *gate_up)
                out, delta = apply(kernels.act_mul(out, "silu", delta), *down)
            kernels.add_rms_norm(out, residual, self._norm, 1e-5, delta)
            return residual

        return run

    def _cut(self, limits: TileLimits) -> LoraTiles:
        """Tiles of the decode rows, then of the prompts."""
        rank, device = self._scene.max_group_rank, self.device
        count = max(self._num_adapters, 1)
        decodes = cut_evenly(self._batch, count, limits, rank, device, only_decodes=True)
        if not self._chunk:
            return decodes
        chunks = cut_evenly(self._chunk, min(count, NUM_PROMPTS), limits, rank, device, only_decodes=False)
        chunks.tiles[:, 1] += self._batch
        return LoraTiles(
            torch.cat([decodes.tiles, chunks.tiles]),
            torch.cat([decodes.weights, chunks.weights]),
            rank,
            max(decodes.max_tokens, chunks.max_tokens),
            decodes.num_decodes,
        )


class _SideLane:
    """A second stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        self._forked.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            yield
        self._done.record(self._stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


class LayerTimes:
    def __init__(self, sizes: Sizes, device: torch.device, batch: int = 64) -> None:
        self._sizes, self._device, self._batch = sizes, device, batch
        self._twins = select_kernels("torch", device)

    def cases(self, parts: list[str]) -> Iterator[Case]:
        yield {"part": "copy"}, self._copy
        for part, loads, places, chunk in (
            ("layers", LOADS, PLACES, 0),
            ("mixed", MIXED_LOADS, MIXED_PLACES, CHUNK_TOKENS),
        ):
            for adapters, rank in loads if part in parts else ():
                layers: list[Layers] = []
                for place in (BASE, *places):
                    key = {"part": part, "place": place.name, "adapters": adapters, "rank": rank}
                    yield (
                        key,
                        lambda p=place, c=chunk, n=adapters, r=rank, kept=layers: self._time(
                            p, c, n, r, kept
                        ),
                    )
        if "fp8" in parts:
            for batch, context in ATTENTIONS:
                for tokens in (64, 128):
                    for stages in (2, 3):
                        key = {
                            "part": "fp8",
                            "batch": batch,
                            "context": context,
                            "tokens": tokens,
                            "stages": stages,
                        }
                        yield key, lambda b=batch, c=context, t=tokens, s=stages: self._attend(b, c, t, s)

    def _kernels(self, place: Place) -> Kernels:
        architecture = name_architecture(self._device)
        sizes = load_sizes(architecture)
        if place.shrink is not None:
            sizes = _replace_shrink(sizes, *place.shrink)
        if place.expand is not None:
            sizes = _replace_expand(sizes, tiles=(ExpandTile(None, *place.expand, num_stages=2),))
        if place.rows is not None:
            sizes = _replace_expand(sizes, rows=RowSizes(*place.rows))
        return TritonKernels(sizes=sizes)

    def _copy(self) -> Row:
        (_, measure), *_ = KernelTimes(self._sizes, self._twins, self._device).cases(["copy"])
        return measure()

    def _time(self, place: Place, chunk: int, num_adapters: int, rank: int, kept: list[Layers]) -> Row:
        if not kept:
            kept.append(Layers(self._sizes, self._batch, chunk, num_adapters, rank, self._device))
        (layers,) = kept
        run = layers.bind(place, self._kernels(place))
        seconds = time_device(run, self._device)
        row = {"us": seconds / layers.shape.num_layers * 1e6, "adapter MB": layers.adapter_bytes / 1e6}
        if place == BASE:
            return row
        if layers.expected is None:
            layers.expected = layers.bind(Place("serial", is_serial=True), self._twins)().float()
        # After many replays, so that a race has many chances to show.
        result = run()
        error = float((result.float() - layers.expected).norm() / layers.expected.norm())
        if place.is_serial:
            layers.serial = result
        has_own_order = place.shrink is not None or layers.serial is None
        same_bits = None if has_own_order else torch.equal(result, layers.serial)
        return row | {"error": error, "same bits": same_bits}

    def _attend(self, batch: int, context: int, tokens: int, stages: int) -> Row:
        def launch(launch: Launch) -> None:
            is_decode = launch.kernel is paged_attention_decode._paged_attention_decode_kernel
            (dataclasses.replace(launch, num_stages=stages) if is_decode else launch).run()

        before = paged_attention_decode.ITERATION_TOKENS
        paged_attention_decode.ITERATION_TOKENS = tokens
        try:
            return self._time_attention(batch, context, TritonKernels(launch))
        finally:
            paged_attention_decode.ITERATION_TOKENS = before

    def _time_attention(self, batch: int, context: int, kernels: Kernels) -> Row:
        geometry, device = self._sizes.geometry(KVFormat.FP8), self._device
        blocks = -(-context // BLOCK_TOKENS)
        pages = _draw_fp8_pages(geometry, batch * blocks, device)
        order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0))
        # Contexts of different lengths, so that the last iteration is not always whole.
        contexts = context - torch.arange(batch, dtype=torch.int32) % 7
        rows = AttentionBatch(
            query_starts=torch.arange(batch + 1, dtype=torch.int32, device=device),
            context_lens=contexts.to(device),
            block_tables=order.int().view(batch, blocks).to(device),
            positions=(contexts - 1).long().to(device),
            kv_slots=torch.arange(batch, device=device),
            max_query_len=1,
            max_context_len=context,
        )
        q = torch.randn(batch, geometry.num_heads, geometry.head_dim, device=device).to(geometry.dtype)
        rule = AttentionRule(geometry.head_dim**-0.5)
        attended = kernels.attend(q, pages, geometry, 1, kernels.prepare_attention(rows), rule).float()
        expected = self._twins.attend(
            q, pages, geometry, 1, self._twins.prepare_attention(rows), rule
        ).float()
        step = kernels.prepare_attention(rows)

        def run() -> None:
            for layer in range(geometry.num_layers):
                kernels.attend(q, pages, geometry, layer, step, rule)

        seconds = time_device(run, device) / geometry.num_layers
        num_bytes = _kv_bytes(geometry, batch * context) / geometry.num_layers
        return {
            "us": seconds * 1e6,
            "GB/s": num_bytes / seconds / 1e9,
            "error": float((attended - expected).norm() / expected.norm()),
        }

    def show_timeline(self, place: Place, chunk: int, num_adapters: int) -> list[Row]:
        """The kernels of the second layer of a replayed graph, in the order in which they start."""
        layers = Layers(self._sizes, self._batch, chunk, num_adapters, 16, self._device)
        run = layers.bind(place, self._kernels(place))
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(2):
                graph.replay()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        kernels = sorted(
            (event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"]
        )
        half = kernels[len(kernels) // 2 :]
        norms = [index for index, event in enumerate(half) if "rms_norm" in event["name"]]
        shown = half[norms[2] : norms[4] + 1]
        return [
            {
                "kernel": event["name"][:48],
                "at us": event["ts"] - shown[0]["ts"],
                "us": event["dur"],
                "stream": event["args"].get("stream"),
                "grid": "x".join(map(str, event["args"].get("grid", []))),
                "threads": event["args"].get("block", [0])[0],
                "registers": event["args"].get("registers per thread"),
                "shared": event["args"].get("shared memory"),
            }
            for event in shown
        ]


def _replace_shrink(sizes: LoraSizes, splits: int, *tile: int) -> LoraSizes:
    """tile: fields of `ShrinkTile` without max_rank."""
    tiles = (ShrinkTile(None, *tile),)
    of_width = ShrinkSizes(None, splits, tiles, tiles)
    return dataclasses.replace(sizes, shrink=(of_width,))


def _replace_expand(sizes: LoraSizes, **fields: Any) -> LoraSizes:
    expand = (dataclasses.replace(of_width, **fields) for of_width in sizes.expand)
    return dataclasses.replace(sizes, expand=tuple(expand))


def _draw_fp8_pages(geometry: KVGeometry, count: int, device: torch.device) -> Tensor:
    """Random elements of all sizes but NaN, and scales around 0.01."""
    pages = torch.randint(
        0, 255, (count, geometry.layout.num_bytes * geometry.num_layers), device=device, dtype=torch.uint8
    )
    pages.masked_fill_((pages & 0x7F) == 0x7F, 0x38)
    layers = pages.view(count, geometry.num_layers, geometry.layout.num_bytes)
    scales = layers[:, :, geometry.layout.scales_start :].view(torch.bfloat16)
    scales.copy_(torch.rand(scales.shape, device=device) * 0.01 + 0.001)
    return pages


def _kv_bytes(geometry: KVGeometry, tokens: int) -> int:
    return tokens * geometry.layout.num_bytes * geometry.num_layers // BLOCK_TOKENS


def compare(rows: list[Row]) -> list[Row]:
    """Adds what the adapters of a layer cost over the base, and what their bytes take at the rate of a copy."""
    rate = next((row["GB/s"] for row in rows if row["part"] == "copy"), None)
    bases = {
        (row["part"], row["adapters"], row["rank"]): row["us"] for row in rows if row.get("place") == "base"
    }
    compared = []
    for row in rows:
        more: Row = {}
        base = bases.get((row["part"], row.get("adapters"), row.get("rank")))
        if base and row["place"] != "base" and rate:
            more = {"over base us": row["us"] - base, "bytes us": row["adapter MB"] / rate * 1e3}
        if row["part"] == "fp8" and rate:
            more = {"of copy": row["GB/s"] / rate}
        compared.append(row | more)
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="file for the rows, as JSON lines; new rows are appended")
    parser.add_argument("--seconds", type=float, default=60.0, help="start no case after this time")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    options = parser.parse_args()
    device = torch.device("cuda")
    table = ResumedTable(options.table, device)
    times = LayerTimes(LLAMA_8B, device)
    is_whole = table.fill(times.cases(options.parts), options.seconds)
    rows = compare(table.rows())
    for part in ("copy", "layers", "mixed", "fp8"):
        if of_part := [{k: v for k, v in row.items() if k != "part"} for row in rows if row["part"] == part]:
            columns = list(dict.fromkeys(name for row in of_part for name in row))
            print_table(part, [{name: row.get(name) for name in columns} for row in of_part])
    if "timeline" in options.parts:
        for place, chunk in ((PLACES[1], 0), (PLACES[2], 0), (MIXED_PLACES[1], CHUNK_TOKENS)):
            with contextlib.suppress(KeyError, IndexError):
                title = f"timeline of {place.name}, {chunk} prompt tokens, 8 adapters"
                print_table(title, times.show_timeline(place, chunk, 8))
    print("\nall cases are measured" if is_whole else "\nnot all cases are measured yet: run this again")


if __name__ == "__main__":
    main()
