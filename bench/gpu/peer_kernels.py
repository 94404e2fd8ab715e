"""Our LoRA kernels beside vLLM's and SGLang's, on the same adapters and the same machine.

Shapes are Llama-3.1-8B's in bfloat16, all four sites of a layer, rank 16, batches of 8 to 256 among 8 and 64 distinct
adapters; the same numbers, in pages for ours and stacked by module for theirs. Each case checks first that theirs and
ours add the same, and then times them over eight layers in turn, as a graph (bench/gpu/kernel_times.py). The bar: ours
are 1.2 times as fast. bench/gpu/peer_sources.py says which sources the peers need.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu.device_time import time_device
from bench.gpu.kernel_times import LLAMA_8B, SITES, Sizes
from bench.gpu.peer_sources import Peer, Weights
from bench.gpu.random_adapters import RandomAdapters, cut_evenly
from bench.table import Row
from slora_kernels.layout import SEGMENT_BYTES, LoraSite, llama_shape
from slora_kernels.ops import Kernels

MakePeer = Callable[[list[int], torch.device], Peer]
RANK = 16
OURS = "slora"
WHOLE = replace(LLAMA_8B, batches=(64,), adapters=(64, 8))
SMALL = Sizes(
    llama_shape(1, 256, 4, 2, 64, 384, 100, 2),
    torch.float16,  # the interpreter multiplies bfloat16's raw bits
    batches=(3,),
    adapters=(2,),
    contexts=(),
    chunks=(),
    copy_bytes=0,
)


class PeerTimes:
    """make_peers: of whoever takes part, by name; given how many tokens each adapter has, and the device."""

    def __init__(
        self, sizes: Sizes, device: torch.device, kernels: Kernels, make_peers: Mapping[str, MakePeer]
    ) -> None:
        self._sizes = sizes
        self._device = device
        self._kernels = kernels
        self._make_peers = make_peers

    def cases(self) -> Iterator[tuple[Row, Callable[[], Row]]]:
        for count in self._sizes.adapters:
            for batch in (b for b in self._sizes.batches if b >= count):
                for group, site in enumerate(SITES):
                    key = {"site": site, "adapters": count, "batch": batch}
                    yield key, lambda n=count, b=batch, g=group: self._measure(n, b, g)

    def _measure(self, num_adapters: int, batch: int, group: int) -> Row:
        """Microseconds of each. Raises AssertionError if somebody adds other numbers."""
        shape, device = self._sizes.shape, self._device
        scene = RandomAdapters.make(shape, self._sizes.dtype, (RANK,), num_adapters, device)
        sites = [shape.layer_sites(layer)[group] for layer in range(shape.num_layers)]
        x = torch.randn(batch, sites[0].in_width, device=device).to(self._sizes.dtype)
        start = torch.randn(batch, sum(sites[0].widths), device=device).to(self._sizes.dtype)
        limits = self._kernels.tile_limits
        tiles = cut_evenly(batch, num_adapters, limits, scene.max_group_rank, device, only_decodes=True)
        step = self._kernels.prepare_lora(tiles, scene.tables)

        def ours(out: Tensor, layer: int) -> None:
            shrunk = self._kernels.shrink(x, scene.pages, sites[layer], step)
            self._kernels.expand(out, shrunk, scene.pages, sites[layer], step)

        row = {OURS: self._time(ours, start)}
        expected = torch.zeros_like(start)
        ours(expected, 0)
        # Of 16 bits, in the shrink output and in what is added, rounding is a hundredth of this.
        most_off = 0.05 * expected.float().std()
        weights = [unpack(scene, site, self._sizes.dtype) for site in sites]
        num_tokens = [len(range(slot, batch, num_adapters)) for slot in range(num_adapters)]
        for name, make in self._make_peers.items():
            peer = make(num_tokens, device)
            prepared = [peer.prepare(one) for one in weights]

            def theirs(out: Tensor, layer: int, peer=peer, prepared=prepared) -> None:
                peer.run(x, out, prepared[layer])

            out = torch.zeros_like(start)
            theirs(out, 0)
            off = (out.float() - expected.float()).abs().max()
            assert off <= most_off, f"what {name} adds is {off} off, and {most_off} is allowed"
            row[name] = self._time(theirs, start)
            row[f"over {name}"] = row[name] / row[OURS]
        return row

    def _time(self, add: Callable[[Tensor, int], None], start: Tensor) -> float:
        out, layers = start.clone(), self._sizes.shape.num_layers

        def work() -> None:
            for layer in range(layers):
                add(out, layer)

        return 1e6 * time_device(work, self._device) / layers


def unpack(scene: RandomAdapters, site: LoraSite, dtype: torch.dtype) -> Weights:
    """Of all adapters of a scene, copied out of their pages."""
    modules = range(site.first_module, site.first_module + len(site.widths))
    first_of_a, first_of_b = scene.layouts[0].groups[site.group, 1], scene.layouts[0].modules[:, 2]
    count = len(scene.tables.page_table)

    def rows(first: int, num_rows: int, width: int) -> Tensor:
        segments = -(-width * dtype.itemsize // SEGMENT_BYTES)
        page_segments = scene.pages.shape[1] // SEGMENT_BYTES
        places = first + torch.arange(num_rows * segments, device=scene.pages.device)
        page_ids = scene.tables.page_table.long()[:, places // page_segments]
        found = scene.pages.view(-1, SEGMENT_BYTES)[page_ids * page_segments + places % page_segments]
        return found.view(count, num_rows, -1).view(dtype)[..., :width]

    a = rows(int(first_of_a), RANK * len(modules), site.in_width)
    b = [
        rows(int(first_of_b[m]), RANK, width).mT.contiguous()
        for m, width in zip(modules, site.widths, strict=True)
    ]
    return Weights([part.contiguous() for part in a.split(RANK, 1)], b)
