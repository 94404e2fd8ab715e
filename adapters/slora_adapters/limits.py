"""The limits that a server sets for adapters. They are read once at startup; an adapter cannot change them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of one server."""

    max_lora_rank: int = 64  # the greatest rank of any module
    # The greatest |alpha / r| (with rslora |alpha / sqrt(r)|). Far larger scales make the outputs overflow.
    max_scale: float = 10_000.0
    max_tensor_bytes: int = 4 << 30  # the largest size of the safetensors file, in bytes
    # The largest size of the chat template and of the generation config, in bytes each.
    max_text_bytes: int = 256 << 10
    # If set ("float32", "float16", "bfloat16"), values that overflow in this dtype are refused.
    served_dtype: str | None = None
    vocab_size: int | None = None  # if set, an adapter's tokenizer must not define token ids at or above it
    # Directory of the base model. If set, an adapter may include copies of the base model's embedding and head, as PEFT
    # saves them, and tokens of an adapter's tokenizer are compared with the base's.
    base_directory: Path | None = None
    # Digests of the tokenizers that an adapter may have, which are the base's as it is saved and as it is served; see
    # `digest_tokenizer`. Empty if tokenizers are not compared.
    tokenizer_digests: tuple[str, ...] = ()
