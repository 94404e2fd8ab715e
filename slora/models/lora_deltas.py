"""Adds the adapters' LoRA outputs to the base model's outputs, site by site."""

from collections.abc import Callable

from torch import Tensor

from slora.device.device_memory import DeviceMemory
from slora.device.side_stream import SideStream
from slora_kernels.batch import LoraTiles
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels


class LoraDeltas:
    """The LoRA work of one step.

    tiles: the rows and their adapters; None: no row has an adapter.
    side: the stream that runs shrinks in parallel with the base's matmuls; with None they run after the matmuls.
    """

    def __init__(
        self, tiles: LoraTiles | None, memory: DeviceMemory, kernels: Kernels, side: SideStream | None = None
    ) -> None:
        self._pages = memory.pages
        self._kernels = kernels
        self._step = kernels.prepare_lora(tiles, memory.tables) if tiles is not None else None
        self._side = side

    def compute(self, base: Callable[[], Tensor], x: Tensor, site: LoraSite) -> Tensor:
        """Runs `base`, which reads x, and adds the adapters' outputs to its result. Returns the sum."""
        if self._step is None or self._side is None:
            out = base()
            self.add(out, x, site)
            return out
        step = self._step
        shrunk = self._side.fork(lambda: self._kernels.shrink(x, self._pages, site, step))
        try:
            out = base()
        finally:
            # Join even if `base` fails: the memory of x must not be reused while the shrink still reads it.
            self._side.join()
        self._kernels.expand(out, shrunk, self._pages, site, step)
        return out

    def add(self, out: Tensor, x: Tensor, site: LoraSite) -> None:
        """out [T, sum(site.widths)] += scale * (x A^T) B^T. x [T, site.in_width]: the input of the site's linears."""
        if self._step is not None:
            shrunk = self._kernels.shrink(x, self._pages, site, self._step)
            self._kernels.expand(out, shrunk, self._pages, site, self._step)

    def add_embedding(self, out: Tensor, token_ids: Tensor, site: LoraSite) -> None:
        """out [T, H] += scale * (columns of A for token_ids [T])^T B^T.

        Called before the model scales its embeddings.
        """
        if self._step is not None:
            shrunk = self._kernels.shrink_embedding(token_ids, self._pages, site, self._step, out.dtype)
            self._kernels.expand(out, shrunk, self._pages, site, self._step)
