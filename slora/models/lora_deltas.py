"""Adds the adapters' LoRA outputs to the base model's outputs, site by site."""

from collections.abc import Callable, Iterable

from torch import Tensor

from slora.device.device_memory import DeviceMemory
from slora.device.side_stream import SideStream
from slora_kernels.batch import LoraTiles
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels


class LoraDeltas:
    """The LoRA work of one step.

    layers: the rows and their adapters. Each layer adds to the result of the layers before it, so the sum of a row's
    adapters has a fixed order. Empty: no row has an adapter.
    side: the stream that runs shrinks in parallel with the base model's matmuls. None: shrinks run after the matmuls.
    """

    def __init__(
        self,
        layers: Iterable[LoraTiles],
        memory: DeviceMemory,
        kernels: Kernels,
        side: SideStream | None = None,
    ) -> None:
        self._pages = memory.pages
        self._kernels = kernels
        self._steps = [kernels.prepare_lora(tiles, memory.tables) for tiles in layers]
        self._side = side

    def compute(self, base: Callable[[], Tensor], x: Tensor, site: LoraSite) -> Tensor:
        """Runs `base`, which reads x, and adds the adapters' outputs to its result. Returns the sum."""
        if not self._steps or self._side is None:
            out = base()
            self.add(out, x, site)
            return out
        shrunk = self._side.fork(
            lambda: [self._kernels.shrink(x, self._pages, site, step) for step in self._steps]
        )
        try:
            out = base()
        finally:
            # Join even if `base` fails: the memory of x must not be reused while the shrink still reads it.
            self._side.join()
        for step, one in zip(self._steps, shrunk, strict=True):
            self._kernels.expand(out, one, self._pages, site, step)
        return out

    def add(self, out: Tensor, x: Tensor, site: LoraSite) -> None:
        """out [T, sum(site.widths)] += scale * (x A^T) B^T. x [T, site.in_width]: the input of the site's linears."""
        for step in self._steps:
            shrunk = self._kernels.shrink(x, self._pages, site, step)
            self._kernels.expand(out, shrunk, self._pages, site, step)

    def add_embedding(self, out: Tensor, token_ids: Tensor, site: LoraSite) -> None:
        """out [T, H] += scale * (columns of A for token_ids [T])^T B^T.

        Called before the model scales its embeddings.
        """
        for step in self._steps:
            shrunk = self._kernels.shrink_embedding(token_ids, self._pages, site, step, out.dtype)
            self._kernels.expand(out, shrunk, self._pages, site, step)
