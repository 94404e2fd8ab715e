"""The simulated machine: a model on a device, and the costs of its work."""

from dataclasses import dataclass

from slora.core.cost_model import CostModel
from slora_kernels.layout import AdapterLayout, ModelShape, lay_out_adapter

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a device.

    pool_tokens: number of tokens whose KV fills the page pool. adapted: paths of the modules that adapters change.
    costs: the cost model of the scheduler, which also gives the times of steps.
    """

    name: str
    shape: ModelShape
    adapted: tuple[str, ...]
    pool_tokens: int
    costs: CostModel
    block_tokens: int = BLOCK_TOKENS

    @property
    def num_pages(self) -> int:
        return self.pool_tokens // self.block_tokens

    @property
    def full_page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.shape.layer_page_bytes(self.block_tokens) * self.shape.num_layers

    @property
    def token_bytes(self) -> int:
        return self.full_page_bytes // self.block_tokens

    def adapter_layout(self, rank: int) -> AdapterLayout:
        def rank_of(path: str) -> int:
            return rank if path in self.adapted else 0

        shape = self.shape
        linears = (index for layer in range(shape.num_layers) for index in shape.layer_linears(layer))
        ranks = [rank_of(shape.linears[index].path) for index in linears]
        ends = rank_of(shape.embedding_path), rank_of(shape.head_path)
        return lay_out_adapter(shape, [*ranks, *ends])

    def pages_of(self, num_bytes: int) -> int:
        return -(-num_bytes // self.full_page_bytes)
