"""What a server accepts of an adapter. Read once at start and handed down; no adapter has a say in it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of one server.

    max_lora_rank: the greatest rank of any module.
    max_scale: the greatest |alpha / r| (with rslora |alpha / sqrt(r)|); far beyond it outputs only overflow.
    max_tensor_bytes: the size of the safetensors file.
    max_text_bytes: each of chat template and generation config.
    served_dtype: if given ("float32", "float16", "bfloat16"), weights that overflow in it are refused.
    vocab_size: if given, an adapter's tokenizer must not define tokens beyond it.
    base_directory: the base model's; if given, an adapter may carry copies of its embedding and head, as PEFT does.
    """

    max_lora_rank: int = 64
    max_scale: float = 10_000.0
    max_tensor_bytes: int = 4 << 30
    max_text_bytes: int = 256 << 10
    served_dtype: str | None = None
    vocab_size: int | None = None
    base_directory: Path | None = None
