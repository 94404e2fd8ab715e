"""What makes two adapters the same weights: SHA-256 over everything that changes the arithmetic, and nothing
else.

First the config's fields, as sorted JSON; pattern tables as lists of pairs, since their order decides which
pattern wins. Then each tensor in the order of names: a line of JSON `[name, dtype, shape]`, then its bytes.
Every part tells its own length, so no two different adapters feed the hash the same bytes.

Not in it: who trained the adapter, on which files, the safetensors metadata, the chat template. Two uploads
that differ only there are the same version of weights.
"""

import hashlib
import json
from collections.abc import Mapping

from slora_adapters.peft.adapter import Factor
from slora_adapters.peft.peft_config import PeftConfig
from slora_adapters.peft.tensor_file import StoredTensor

DIGEST_VERSION = 1


class AdapterHash:
    """The digest while the tensors come, in the order of names: `describe(tensor)`, then its bytes, in pieces of any
    size. Several pieces at a time are hashed as one: other threads run meanwhile, and each change between them costs as
    much as hashing tens of KB.
    """

    def __init__(self, config: PeftConfig) -> None:
        first = _line({"slora_digest": DIGEST_VERSION, "config": _arithmetic_fields(config)})
        self._sha = hashlib.sha256(first)

    @staticmethod
    def describe(tensor: Factor) -> bytes:
        """What goes before its bytes."""
        return _line([tensor.name, tensor.dtype, list(tensor.shape)])

    def update(self, *pieces: bytes | memoryview) -> None:
        self._sha.update(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def adapter_digest(config: PeftConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """64 lower-case hexadecimal digits. `tensors`: all of the file's, by their names in the file."""
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
