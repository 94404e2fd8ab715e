"""How long the kernels take on this GPU, beside the bytes that they must move and its own copies.

    python -m bench.gpu.kernel_times FILE [--seconds 480] [--kinds copy matmul lora decode prefill sample]

FILE gets a row for each case as it is measured; run again, it goes on behind the last one. Shapes are Llama-3.1-8B's in
bfloat16. Calls go over several layers in turn, so that nothing is found in a cache because it was used just now; they
are captured as one graph, so that what is timed is the device's and not the host's.

matmul   of square matrices: the rate that prefill is compared with.
lora     a site's shrink and expand: batch, distinct adapters, ranks. Bytes: A and B of the distinct adapters, x once,
         the output twice.
decode   attention of one token a sequence: batch, context, what K and V are kept as. Bytes: K and V. Kept as latents,
         they are those of DeepSeek V2 Lite.
prefill  a chunk behind a context: TFLOP/s.
sample   tokens of a whole vocabulary, without filters and with: batch. Bytes: the logits.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.gpu.device_time import time_device
from bench.gpu.random_adapters import BLOCK_TOKENS, RandomAdapters, cut_evenly
from bench.gpu.resumed_table import Case, ResumedTable
from bench.table import Row, print_table
from slora_kernels.batch import AttentionBatch, AttentionRule, KVGeometry
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import LoraSite, ModelShape, llama_shape
from slora_kernels.ops import Kernels
from slora_kernels.sampling_tensors import NO_TOP_K, SamplingTensors

# Query heads, KV heads, the row of a token, and the latent in it.
_LATENT_HEADS, _LATENT_WIDTH = (16, 1, 576), 512
RANKS: dict[str, tuple[int, ...]] = {"8": (8,), "16": (16,), "64": (64,), "mixed": (8, 16, 64)}
SITES = ("qkv", "o", "gate_up", "down")
FILTERS = {"none": (0, 1.0), "top_p 0.9": (0, 0.9), "top_k 50, top_p 0.9": (50, 0.9)}


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
    matmul_size: int = 8192

    def geometry(self, kv_format: KVFormat) -> KVGeometry:
        shape = self.shape
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        return KVGeometry(shape.num_layers, *heads, BLOCK_TOKENS, self.dtype, kv_format)

    def geometries(self) -> dict[str, KVGeometry]:
        """What K and V are kept as, by name."""
        latents = KVGeometry(
            self.shape.num_layers, *_LATENT_HEADS, BLOCK_TOKENS, self.dtype, latent_width=_LATENT_WIDTH
        )
        return {kv.value: self.geometry(kv) for kv in KVFormat} | {"latents": latents}


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
            "matmul": self._matmuls,
            "lora": self._loras,
            "decode": self._decodes,
            "prefill": self._prefills,
            "sample": self._sample,
        }
        for kind in kinds:
            for key, measure in makers[kind]():
                yield {"kind": kind, **key}, measure

    def _copies(self) -> Iterator[Case]:
        def measure() -> Row:
            source = torch.ones(self._sizes.copy_bytes, dtype=torch.uint8, device=self._device)
            target = torch.empty_like(source)
            # In a graph, a copy engine would copy, at two thirds of the rate of the multiprocessors (H200).
            seconds = time_device(lambda: target.copy_(source), self._device, graph=False)
            return _rate(seconds, 2 * source.nbytes)

        yield {}, measure

    def _matmuls(self) -> Iterator[Case]:
        size = self._sizes.matmul_size

        def measure() -> Row:
            a, b = (torch.randn(size, size, device=self._device).to(self._sizes.dtype) for _ in range(2))
            out = torch.empty_like(a)
            seconds = time_device(lambda: torch.matmul(a, b, out=out), self._device)
            return _rate(seconds, 3 * a.nbytes) | {"TFLOP/s": 2 * size**3 / seconds / 1e12}

        yield {"size": size}, measure

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
        scene = RandomAdapters.make(shape, self._sizes.dtype, RANKS[rank], num_adapters, device)
        limits = self._kernels.tile_limits
        tiles = cut_evenly(batch, num_adapters, limits, scene.max_group_rank, device, only_decodes=True)
        sites = [shape.layer_sites(layer)[group] for layer in range(shape.num_layers)]
        x = torch.randn(batch, sites[0].in_width, device=device).to(self._sizes.dtype)
        out = torch.zeros(batch, sum(sites[0].widths), dtype=x.dtype, device=device)

        def work(kernels: Kernels, sites: list[LoraSite]) -> Callable[[], None]:
            step = kernels.prepare_lora(tiles, scene.tables)

            def run() -> None:
                for site in sites:
                    kernels.expand(out, kernels.shrink(x, scene.pages, site, step), scene.pages, site, step)

            return run

        seconds = time_device(work(self._kernels, sites), self._device) / len(sites)
        # The twin launches many kernels for each adapter, so two layers are enough.
        twin = time_device(work(self._twins, sites[:2]), self._device, graph=False) / 2
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
        for kv, geometry in self._sizes.geometries().items():
            for context in self._sizes.contexts:
                for batch in self._sizes.batches:
                    if _kv_bytes(geometry, batch * context) <= _MOST_KV_BYTES:
                        key = {"kv": kv, "batch": batch, "context": context}
                        yield key, lambda b=batch, c=context, g=geometry: self._attention(b, 1, c, g)

    def _prefills(self) -> Iterator[Case]:
        for kv, geometry in self._sizes.geometries().items():
            for tokens in self._sizes.chunks:
                for before in (0, self._sizes.contexts[0]):
                    key = {"kv": kv, "tokens": tokens, "context": before + tokens}
                    yield key, lambda t=tokens, c=before + tokens, g=geometry: self._attention(1, t, c, g)

    def _sample(self) -> Iterator[Case]:
        for filters in FILTERS:
            for batch in self._sizes.batches:
                yield {"filters": filters, "batch": batch}, lambda f=filters, b=batch: self._draw(f, b)

    def _draw(self, filters: str, batch: int) -> Row:
        top_k, top_p = FILTERS[filters]
        device = self._device
        # As flat as a chat model's: some hundred tokens are worth drawing.
        logits = (3 * torch.randn(batch, self._sizes.shape.vocab_size, device=device)).to(self._sizes.dtype)
        max_logits = logits.float().amax(-1)
        whole = [range(batch), range(batch), [top_k or NO_TOP_K] * batch]
        fractions = [[1.0] * batch, [top_p] * batch, [0.0] * batch]
        sampling = SamplingTensors.upload(np.array(whole, np.int64), np.array(fractions), device)
        seconds = time_device(lambda: self._kernels.sample(logits, max_logits, sampling), device)
        twin = time_device(lambda: self._twins.sample(logits, max_logits, sampling), device, graph=False)
        return _rate(seconds, logits.nbytes) | {"torch us": twin * 1e6}

    def _attention(self, batch: int, tokens: int, context: int, geometry: KVGeometry) -> Row:
        device, blocks = self._device, -(-context // BLOCK_TOKENS)
        pages = torch.empty(
            batch * blocks, _kv_bytes(geometry, BLOCK_TOKENS), dtype=torch.uint8, device=device
        )
        if geometry.has_scales:
            # Any numbers will do that are finite: 1.5, with scales of 0.011.
            pages.fill_(0x3C)
        else:
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
                max_query_len=tokens,
                max_context_len=context,
            )
        )
        q = torch.randn(batch * tokens, geometry.num_heads, geometry.head_dim, device=device)
        q = q.to(geometry.dtype)
        rule = AttentionRule(geometry.head_dim**-0.5)

        def run() -> None:
            for layer in range(geometry.num_layers):
                self._kernels.attend(q, pages, geometry, layer, step, rule)

        seconds = time_device(run, self._device) / geometry.num_layers
        row = _rate(seconds, _kv_bytes(geometry, batch * context) // geometry.num_layers)
        pairs = batch * tokens * (context - (tokens - 1) / 2)
        products = geometry.num_heads * (geometry.head_dim + geometry.value_width)
        return row | {"TFLOP/s": 2 * pairs * products / seconds / 1e12}


def _kv_bytes(geometry: KVGeometry, tokens: int) -> int:
    return tokens * geometry.layout.num_bytes * geometry.num_layers // BLOCK_TOKENS


def _rate(seconds: float, num_bytes: int) -> Row:
    return {"us": seconds * 1e6, "MB": num_bytes / 1e6, "GB/s": num_bytes / seconds / 1e9}


def compare(rows: list[Row]) -> list[Row]:
    """Each rate over that of the copy, if that was measured."""
    copies = [row["GB/s"] for row in rows if row["kind"] == "copy"]
    return [row | {"of copy": row["GB/s"] / copies[-1] if copies else None} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ["copy", "matmul", "lora", "decode", "prefill", "sample"]
    parser.add_argument("table", type=Path, help="file for the rows, as JSON lines; new rows are appended")
    parser.add_argument("--seconds", type=float, default=480.0, help="start no case after this time")
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
    print("\nall cases are measured" if is_whole else "\nnot all cases are measured yet: run this again")


if __name__ == "__main__":
    main()
