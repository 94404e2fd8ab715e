"""Identifies a base model by a sample of its weights. An adapter must be served on the weights that it was trained on.

Directory names do not matter, nor do config and tokenizer. Models with equal weights have the same fingerprint, no
matter how they are split into files.
"""

import hashlib
import json
import os
from collections import defaultdict
from pathlib import Path

from slora.weights.checkpoint import Checkpoint
from slora.weights.safetensors_file import StoredTensor

__all__ = ["fingerprint"]

_VERSION = 1
# From each tensor, 16 pieces of 64 bytes are read, evenly spread. Training changes nearly every number of a tensor, and
# 1 KiB of bfloat16 contains some 500 numbers. An 8B model needs 5000 small reads.
_NUM_PIECES = 16
_PIECE_BYTES = 64


def fingerprint(directory: Path) -> str:
    """64 lower-case hexadecimal digits: SHA-256 over every tensor's name, dtype, shape and sampled bytes.

    Raises ConfigError if there is no checkpoint. A change of a few single numbers may go undetected.
    """
    checkpoint = Checkpoint(directory)
    by_file: dict[Path, list[StoredTensor]] = defaultdict(list)
    for name in checkpoint:
        tensor = checkpoint.find(name)
        by_file[tensor.path].append(tensor)
    lines: dict[str, bytes] = {}
    for path, tensors in by_file.items():
        with path.open("rb") as file:
            lines |= {tensor.name: _line(tensor, file.fileno()) for tensor in tensors}
    sha = hashlib.sha256(json.dumps({"slora_base_fingerprint": _VERSION}).encode())
    for name in sorted(lines):
        sha.update(lines[name])
    return sha.hexdigest()


def _line(tensor: StoredTensor, file: int) -> bytes:
    """The line that is hashed for one tensor. It contains a digest of the sampled bytes instead of the bytes."""
    size = tensor.num_bytes
    last = max(0, size - _PIECE_BYTES)
    # Worked example: of 2048 bytes the pieces begin at 0, 132, 264, ..., 1984.
    starts = sorted({last * piece // (_NUM_PIECES - 1) for piece in range(_NUM_PIECES)})
    content = b"".join(os.pread(file, min(_PIECE_BYTES, size), tensor.offset + start) for start in starts)
    digest = hashlib.sha256(content).hexdigest()
    return json.dumps([tensor.name, tensor.dtype, list(tensor.shape), digest]).encode() + b"\n"
