"""Tells one base model from another by its weights, without reading them all: what an adapter was trained on must be
what it is served on, whatever the two directories are called.

Knows no config and no tokenizer: models of equal weights have the same fingerprint, however they are cut into files.
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
# Of each tensor, spread evenly over it, so many pieces of so many bytes. Training moves nearly every number of a
# tensor, and of 1 KiB of bfloat16 some 500 are seen; an 8B model takes 5000 small reads.
_NUM_PIECES = 16
_PIECE_BYTES = 64


def fingerprint(directory: Path) -> str:
    """64 lower-case hexadecimal digits: SHA-256 over every tensor's name, dtype, shape and pieces of its bytes.

    Raises ConfigError if there is no checkpoint. A change of a few single numbers may go unseen.
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
    """What goes into the hash for one tensor; its own digest, so that lines are of a form that can't be mistaken."""
    size = tensor.num_bytes
    last = max(0, size - _PIECE_BYTES)
    # Worked example: of 2048 bytes the pieces begin at 0, 132, 264, ..., 1984.
    starts = sorted({last * piece // (_NUM_PIECES - 1) for piece in range(_NUM_PIECES)})
    content = b"".join(os.pread(file, min(_PIECE_BYTES, size), tensor.offset + start) for start in starts)
    digest = hashlib.sha256(content).hexdigest()
    return json.dumps([tensor.name, tensor.dtype, list(tensor.shape), digest]).encode() + b"\n"
