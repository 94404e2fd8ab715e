"""How long the kernels take on this GPU, beside the bytes that they must move and its own copies.

    python -m bench.gpu.kernel_times FILE [--seconds 480] [--kinds copy lora decode prefill]

FILE gets a row for each case as it is measured; run again, it goes on behind the last one. Shapes are Llama-3.1-8B's in
bfloat16. Calls go over several layers in turn, so that nothing is found in a cache because it was used just now; they
are captured as one graph, so that what is timed is the device's and not the host's.

lora     a site's shrink and expand: batch, distinct adapters, ranks. Bytes: A and B of the distinct adapters, x once,
         the output twice.
decode   attention of one token a sequence: batch, context. Bytes: K and V.
prefill  a chunk behind a context: TFLOP/s.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.resumed_table import ResumedTable
from bench.table import Row, print_table
from slora.lora_tiles import cut_rows, max_rows
from slora_kernels.batch import AdapterTables, AttentionBatch, AttentionRule, KVGeometry, LoraTiles
from slora_kernels.layout import AdapterLayout, ModelShape, lay_out_adapter, llama_shape
from slora_kernels.ops import Kernels, select_kernels

BLOCK_TOKENS = 16
REPEATS = 20
RANKS: dict[str, tuple[int, ...]] = {"8": (8,), "16": (16,), "64": (64,), "mixed": (8, 16, 64)}
SITES = ("qkv", "o", "gate_up", "down")
Case = tuple[Row, Callable[[], Row]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is gone through. layers: those that calls take in turn."""

    shape: ModelShape
    dtype: torch.dtype
    batches: tuple[int, ...]
    adapters: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    copy_bytes: int

    @property
    def geometry(self) -> KVGeometry:
        shape = self.shape
        return KVGeometry(
            shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_TOKENS, self.dtype
        )


LLAMA_8B = Sizes(
    llama_shape(8, 4096, 32, 8, 128, 14336, 128256, 2),
    torch.bfloat16,
    batches=(1, 8, 32, 64, 128, 256),
    adapters=(1, 8, 64),
    contexts=(1024, 4096, 8192, 32768),
    chunks=(512, 2048),
    copy_bytes=4 << 30,
)
# Of K and V together, at most: the largest batches have no longer contexts than that.
_MOST_KV_BYTES = 48 << 30


class KernelTimes:
    def __init__(self, sizes: Sizes, kernels: Kernels, device: torch.device) -> None:
        self._sizes = sizes
        self._kernels = kernels
        self._device = device
        self._twins = select_kernels("torch", device)

    def cases(self, kinds: list[str]) -> Iterator[Case]:
        makers = {
            "copy": self._copies,
            "lora": self._loras,
            "decode": self._decodes,
            "prefill": self._prefills,
        }
        for kind in kinds:
            for key, measure in makers[kind]():
                yield {"kind": kind, **key}, measure

    def _copies(self) -> Iterator[Case]:
        def measure() -> Row:
            source = torch.ones(self._sizes.copy_bytes, dtype=torch.uint8, device=self._device)
            target = torch.empty_like(source)
            seconds = self._time(lambda: target.copy_(source))
            return _rate(seconds, 2 * source.nbytes)

        yield {}, measure

    def _loras(self) -> Iterator[Case]:
        for rank in RANKS:
            for count in self._sizes.adapters:
                for batch in self._sizes.batches:
                    if count <= batch:
                        for group, site in enumerate(SITES):
                            key = {"site": site, "rank": rank, "adapters": count, "batch": batch}
                            yield key, lambda r=rank, n=count, b=batch, g=group: self._lora(r, n, b, g)

    def _lora(self, rank: str, num_adapters: int, batch: int, group: int) -> Row:
        shape, device = self._sizes.shape, self._device
        scene = _Adapters.make(self._sizes, RANKS[rank], num_adapters, device)
        tiles = _cut_tiles(batch, num_adapters, self._kernels.tile_tokens, scene.max_group_rank, device)
        sites = [shape.layer_sites(layer)[group] for layer in range(shape.num_layers)]
        x = torch.randn(batch, sites[0].in_width, device=device).to(self._sizes.dtype)
        out = torch.zeros(batch, sum(sites[0].widths), dtype=x.dtype, device=device)

        def work(kernels: Kernels) -> Callable[[], None]:
            step = kernels.prepare_lora(tiles, scene.tables)

            def run() -> None:
                for site in sites:
                    kernels.expand(out, kernels.shrink(x, scene.pages, site, step), scene.pages, site, step)

            return run

        seconds = self._time(work(self._kernels)) / len(sites)
        twin = self._time(work(self._twins), graph=False) / len(sites)
        rows = sum(
            int(scene.layouts[n % len(scene.layouts)].groups[sites[0].group, 0]) for n in range(num_adapters)
        )
        adapter_bytes = rows * sites[0].in_width * x.element_size()
        adapter_bytes += sum(
            int(scene.layouts[n % len(scene.layouts)].modules[module, 0]) * width * x.element_size()
            for n in range(num_adapters)
            for module, width in enumerate(sites[0].widths, sites[0].first_module)
        )
        return _rate(seconds, adapter_bytes + x.nbytes + 2 * out.nbytes) | {"torch us": twin * 1e6}

    def _decodes(self) -> Iterator[Case]:
        for context in self._sizes.contexts:
            for batch in self._sizes.batches:
                if self._kv_bytes(batch * context) <= _MOST_KV_BYTES:
                    key = {"batch": batch, "context": context}
                    yield key, lambda b=batch, c=context: self._attention(b, 1, c)

    def _prefills(self) -> Iterator[Case]:
        for tokens in self._sizes.chunks:
            for before in (0, self._sizes.contexts[0]):
                key = {"tokens": tokens, "context": before + tokens}
                yield key, lambda t=tokens, c=before + tokens: self._attention(1, t, c)

    def _attention(self, batch: int, tokens: int, context: int) -> Row:
        geometry, device = self._sizes.geometry, self._device
        blocks = -(-context // BLOCK_TOKENS)
        pages = torch.empty(batch * blocks, self._kv_bytes(BLOCK_TOKENS), dtype=torch.uint8, device=device)
        pages.view(geometry.dtype).normal_()
        order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0))
        starts = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32)
        positions = torch.arange(context - tokens, context).repeat(batch)
        step = self._kernels.prepare_attention(
            AttentionBatch(
                query_starts=starts.to(device),
                context_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
                block_tables=order.int().view(batch, blocks).to(device),
                positions=positions.to(device),
                kv_slots=positions.to(device),
                max_query=tokens,
                max_context=context,
            )
        )
        q = torch.randn(batch * tokens, geometry.num_heads, geometry.head_dim, device=device)
        q = q.to(geometry.dtype)
        rule = AttentionRule(geometry.head_dim**-0.5)

        def run() -> None:
            for layer in range(geometry.num_layers):
                self._kernels.attend(q, pages, geometry, layer, step, rule)

        seconds = self._time(run) / geometry.num_layers
        row = _rate(seconds, self._kv_bytes(batch * context) // geometry.num_layers)
        pairs = batch * tokens * (context - (tokens - 1) / 2)
        return row | {"TFLOP/s": 4 * pairs * geometry.num_heads * geometry.head_dim / seconds / 1e12}

    def _kv_bytes(self, tokens: int) -> int:
        geometry = self._sizes.geometry
        page_bytes = geometry.block_elements * geometry.dtype.itemsize * geometry.num_layers
        return tokens * page_bytes // BLOCK_TOKENS

    def _time(self, work: Callable[[], object], *, graph: bool = True) -> float:
        """Median seconds. On a GPU `work` is replayed as a graph, unless it waits for the device."""
        work()
        if self._device.type != "cuda":
            return _time_on_cpu(work)
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                work()
            work = captured.replay
        work()
        spans = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            spans.append((begin, end))
        torch.cuda.synchronize(self._device)
        return statistics.median(begin.elapsed_time(end) for begin, end in spans) / 1e3


@dataclass(frozen=True, slots=True)
class _Adapters:
    """Random numbers in pages of their own for each; ranks are given out in turn."""

    pages: Tensor
    tables: AdapterTables
    layouts: list[AdapterLayout]
    max_group_rank: int

    @staticmethod
    def make(sizes: Sizes, ranks: tuple[int, ...], count: int, device: torch.device) -> "_Adapters":
        shape = sizes.shape
        linears = shape.num_modules - 2
        layouts = [lay_out_adapter(shape, [rank] * linears + [0, 0]) for rank in ranks]
        page_bytes = shape.page_bytes(BLOCK_TOKENS) * shape.num_layers
        most_pages = max(-(-layout.num_bytes // page_bytes) for layout in layouts)
        pages = torch.empty(count * most_pages, page_bytes, dtype=torch.uint8, device=device)
        pages.view(sizes.dtype).normal_(std=0.02)
        order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(0))
        mine = [layouts[slot % len(layouts)] for slot in range(count)]
        tables = AdapterTables(
            order.int().view(count, most_pages).to(device),
            torch.stack([torch.from_numpy(layout.groups) for layout in mine]).to(device),
            torch.stack([torch.from_numpy(layout.modules) for layout in mine]).to(device),
            torch.ones(count, shape.num_modules, device=device),
        )
        return _Adapters(pages, tables, layouts, max(layout.reach.max_group_rank for layout in mine))


def _cut_tiles(
    batch: int, num_adapters: int, tile_tokens: int, max_group_rank: int, device: torch.device
) -> LoraTiles:
    first, tiles = 0, []
    for slot in range(num_adapters):
        count = len(range(slot, batch, num_adapters))
        cut = cut_rows((slot, 1.0), count, tile_tokens)
        tiles += [tile._replace(first_row=first + tile.first_row) for tile in cut]
        first += count
    rows = torch.tensor([tile[:3] for tile in tiles], dtype=torch.int32, device=device)
    return LoraTiles(rows, torch.ones(len(tiles), device=device), max_group_rank, max_rows(tiles))


def _time_on_cpu(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _rate(seconds: float, num_bytes: int) -> Row:
    return {"us": seconds * 1e6, "MB": num_bytes / 1e6, "GB/s": num_bytes / seconds / 1e9}


def compare(rows: list[Row]) -> list[Row]:
    """Each rate over that of the copy, if that was measured."""
    copies = [row["GB/s"] for row in rows if row["kind"] == "copy"]
    return [row | {"of copy": row["GB/s"] / copies[-1] if copies else None} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ["copy", "lora", "decode", "prefill"]
    parser.add_argument("table", type=Path, help="JSON lines; it is added to")
    parser.add_argument("--seconds", type=float, default=480.0, help="no case is begun after so long")
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    options = parser.parse_args()
    device = torch.device("cuda")
    table = ResumedTable(options.table, device)
    times = KernelTimes(LLAMA_8B, select_kernels("auto", device), device)
    is_whole = table.fill(times.cases(options.kinds), options.seconds)
    rows = compare(table.rows())
    for kind in kinds:
        if of_kind := [row for row in rows if row["kind"] == kind]:
            print_table(kind, of_kind)
    print("\nall is measured" if is_whole else "\nnot all is measured yet: run it again")


if __name__ == "__main__":
    main()
