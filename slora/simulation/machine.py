"""The simulated machine: a model on a device, and the costs of its work."""

from dataclasses import dataclass

from slora.cost_model import CostModel
from slora_kernels.layout import AdapterLayout, ModelShape, lay_out_adapter

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a device.

    pool_tokens: the tokens of KV that the whole page pool would hold. adapted: the linears that adapters change.
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
        return self.shape.page_bytes(self.block_tokens) * self.shape.num_layers

    @property
    def token_bytes(self) -> int:
        return self.full_page_bytes // self.block_tokens

    def adapter_layout(self, rank: int) -> AdapterLayout:
        ranks = [rank if linear.path in self.adapted else 0 for linear in self.shape.linears]
        return lay_out_adapter(self.shape, [*ranks * self.shape.num_layers, 0, 0])

    def pages_of(self, num_bytes: int) -> int:
        return -(-num_bytes // self.full_page_bytes)
