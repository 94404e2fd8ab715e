"""The digest of an adapter's weights: SHA-256 over everything that changes the arithmetic, and nothing else.

The hash first covers the config's fields as sorted JSON, after `targeting.spell_out`. Pattern tables are lists of
pairs, because their order decides which pattern wins. Then it covers each tensor in name order: a JSON list of name,
dtype and shape in one line, and the tensor's bytes. Every part has a known length, so two different adapters never hash
the same bytes.

The hash does not cover provenance, file names, safetensors metadata or the chat template. Two uploads that differ only
in these have the same digest.
"""

import hashlib
import json
from collections.abc import Mapping

from slora_adapters.peft.peft_config import PeftConfig
from slora_adapters.peft.tensor_file import Factor, StoredTensor

DIGEST_VERSION = 1


class AdapterHash:
    """Computes the digest incrementally. Call it with the tensors in name order: `describe(tensor)`, then the tensor's
    bytes, in pieces of any size.

    Pass several pieces to one `update`. Each call releases the GIL, and the resulting thread switch takes as long as
    hashing tens of KB.
    """

    def __init__(self, config: PeftConfig) -> None:
        first = _line({"slora_digest": DIGEST_VERSION, "config": _arithmetic_fields(config)})
        self._sha = hashlib.sha256(first)

    @staticmethod
    def describe(tensor: Factor) -> bytes:
        """Returns the line that is hashed before the tensor's bytes."""
        return _line([tensor.name, tensor.dtype, list(tensor.shape)])

    def update(self, *pieces: bytes | memoryview) -> None:
        self._sha.update(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def adapter_digest(config: PeftConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """Returns the digest, 64 lower-case hexadecimal digits. `tensors`: all tensors of the adapter, by their names in
    the file.
    """
    digest = AdapterHash(config)
    for name in sorted(tensors):
        digest.update(AdapterHash.describe(tensors[name]))
        digest.update(tensors[name].values.reshape(-1).view("u1").data)
    return digest.hexdigest()


def _arithmetic_fields(config: PeftConfig) -> dict[str, object]:
    patterns = {"rank_pattern": config.rank_patterns, "alpha_pattern": config.alpha_patterns}
    return config.to_json() | patterns


def _line(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
