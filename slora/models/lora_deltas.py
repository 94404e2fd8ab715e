"""What adapters add to the base's outputs, site by site: called by whoever computes the base."""

from collections.abc import Callable

from torch import Tensor

from slora.device.page_memory import PageMemory
from slora.device.side_stream import SideStream
from slora_kernels.batch import LoraTiles
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels


class LoraDeltas:
    """For rows that are cut into `tiles`; with None nothing is added to any of them.

    side: where shrinks run beside the base's matmuls; None: after them.
    """

    def __init__(
        self, tiles: LoraTiles | None, memory: PageMemory, kernels: Kernels, side: SideStream | None = None
    ) -> None:
        self._pages = memory.pages
        self._kernels = kernels
        self._step = kernels.prepare_lora(tiles, memory.tables) if tiles is not None else None
        self._side = side

    def compute(self, base: Callable[[], Tensor], x: Tensor, site: LoraSite) -> Tensor:
        """What `base` returns, which reads x, as `add` leaves it."""
        if self._step is None or self._side is None:
            out = base()
            self.add(out, x, site)
            return out
        step = self._step
        bridge = self._side.fork(lambda: self._kernels.shrink(x, self._pages, site, step))
        try:
            out = base()
        finally:
            # Of a base that fails, too: x becomes somebody else's memory then.
            self._side.join()
        self._kernels.expand(out, bridge, self._pages, site, step)
        return out

    def add(self, out: Tensor, x: Tensor, site: LoraSite) -> None:
        """out [T, sum(site.widths)] += scale * (x A^T) B^T, with x [T, site.in_width] what the site's linears read."""
        if self._step is not None:
            bridge = self._kernels.shrink(x, self._pages, site, self._step)
            self._kernels.expand(out, bridge, self._pages, site, self._step)

    def add_embedding(self, out: Tensor, token_ids: Tensor, site: LoraSite) -> None:
        """out [T, H] += scale * (columns of A for token_ids [T])^T B^T. Before a model scales its embeddings."""
        if self._step is not None:
            bridge = self._kernels.look_up(token_ids, self._pages, site, self._step, out.dtype)
            self._kernels.expand(out, bridge, self._pages, site, self._step)
