"""Reads an adapter from a blob of a store: first its config and header, then its tensors in batches.

Tensors are read in the order in which the digest hashes them. Files in stores have the same order (`adapter.py`), so
they are read sequentially. While one batch of rows is read, earlier batches are hashed on one thread and packed on
another. So a load takes as long as the slowest of the three stages, and holds only a few batches in memory.

The upload's checks have already scanned the weights, and the same digest means the same weights. So only checks whose
result depends on this server are repeated. Shapes, ranks and scales are checked from the header. Overflow of the served
dtype is checked during conversion.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.errors import AdapterCorrupt, AdapterInvalid, Reason
from slora_adapters.peft.adapter import (
    DIGEST_VERSION,
    DIGEST_VERSIONS,
    TENSORS_NAME,
    AdapterHash,
    AdapterLimits,
    AdapterTensors,
)
from slora_adapters.peft.packing import ByteArray, Packer
from slora_adapters.peft.peft_config import (
    CONFIG_NAME,
    DIGEST_FIELD,
    MAX_CONFIG_BYTES,
    PeftConfig,
    parse_peft_config,
)
from slora_adapters.peft.targeting import resolve_targets
from slora_adapters.peft.tensor_file import DTYPES, PREFIX_BYTES, TensorSpan, measure_header, parse_spans
from slora_adapters.peft.validation import validate
from slora_adapters.store.store import Blob
from slora_kernels.layout import AdapterLayout, ModelShape
from slora_kernels.partition import Partition

# With this size, there are few batches, and a batch stays in the CPU cache from reading to packing.
BATCH_BYTES = 1 << 20
# One buffer is being filled, one is hashed, one is packed, and a spare one absorbs differences in speed.
NUM_BUFFERS = 4


def make_buffers(batch_bytes: int = BATCH_BYTES) -> list[bytearray]:
    """Returns the buffers that `StoredAdapter.pour` needs to read batches of this size."""
    return [bytearray(batch_bytes) for _ in range(NUM_BUFFERS)]


class StoredAdapter:
    """An adapter in a blob. `pour` raises an error unless the adapter has the given digest.

    The constructor reads config and header, and raises AdapterCorrupt if they are not valid on this server.
    Errors from reading the blob are propagated.
    """

    def __init__(
        self, blob: Blob, digest: str, shape: ModelShape, limits: AdapterLimits, num_ranks: int = 1
    ) -> None:
        self._blob = blob
        self._digest = digest
        self._partition = Partition(shape, num_ranks)
        try:
            config = bytes(_read(blob, CONFIG_NAME, 0, _size(blob, CONFIG_NAME, MAX_CONFIG_BYTES)))
            self._body_start, header, body_bytes = _read_header(blob, limits)
            parse = _parse_known if len(config) + len(header) <= _KNOWN_BYTES else _parse
            self._parsed = parse(config, header, body_bytes, self._partition, limits)
        except ValueError as error:
            raise AdapterCorrupt(f"stored adapter {digest[:12]} cannot be served here: {error}") from error
        self.layout: AdapterLayout = self._parsed.layout

    def pour(
        self,
        region: ByteArray,
        dtype: str,
        buffers: list[bytearray],
        on_read: Callable[[], None] = lambda: None,
    ) -> npt.NDArray[np.float32]:
        """Packs the tensors into `region`, uint8 [num_ranks * layout.num_bytes], for the served dtype.

        Returns the scales.

        The content of `region` is undefined until this method returns. buffers: from `make_buffers`, with any content,
        and used only during the call. on_read: called after each batch that was read.

        Raises AdapterCorrupt if the digest differs or a value overflows, and what reading the blob raises. After an
        error, no thread writes to `region` any more.
        """

        def make_packer() -> Packer:
            return Packer(self._parsed.tensors, self._partition, dtype, self.layout, region)

        found = []
        # The stored config says which hash made the digest. It is not trusted, so the load tries the other one, too.
        for version in self._parsed.digest_versions:
            digest = AdapterHash(self._parsed.config, version)
            try:
                packer = self._read(digest, make_packer, list(buffers), on_read)
            except AdapterInvalid as error:
                raise AdapterCorrupt(
                    f"stored adapter {self._digest[:12]} cannot be served here: {error}"
                ) from error
            found.append(digest.hexdigest())
            if found[-1] == self._digest:
                return packer.scales
        raise AdapterCorrupt(
            f"the bytes of stored adapter {self._digest[:12]} have the digest {found[0][:12]} instead"
        )

    def _read(
        self,
        digest: AdapterHash,
        make_packer: Callable[[], Packer],
        spare: list[bytearray],
        on_read: Callable[[], None],
    ) -> Packer:
        """Reads all tensors, while one thread hashes them and another thread packs them. Returns the packer. Raises
        AdapterInvalid if a value overflows. When this method returns or raises, the two threads have ended.
        """
        under_way: deque[tuple[bytearray, Future[None], Future[None]]] = deque()
        with (
            ThreadPoolExecutor(1, "adapter-hash") as hashing,
            ThreadPoolExecutor(1, "adapter-pack") as packing,
        ):
            batch_bytes = len(spare[0])
            packer = packing.submit(make_packer)
            for batch in _list_batches(self._parsed.spans, batch_bytes):
                buffer = spare.pop() if spare else _finish(*under_way.popleft())
                if len(buffer) < batch.num_bytes:
                    buffer = bytearray(batch.num_bytes)  # the batch is a row that is longer
                content = memoryview(buffer)[: batch.num_bytes]
                self._blob.read_into(TENSORS_NAME, self._body_start + batch.start, content)
                on_read()
                hashed = hashing.submit(_hash, batch, content, digest, self._parsed.lines)
                under_way.append((buffer, hashed, packing.submit(_pack, batch, content, packer)))
            while under_way:
                _finish(*under_way.popleft())
            return packer.result()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive rows of one tensor."""

    tensor: TensorSpan
    first_row: int
    num_rows: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows that are adjacent in the body of the file, starting at byte `start`."""

    start: int
    rows: list[_Rows]
    num_bytes: int


def _list_batches(spans: Mapping[str, TensorSpan], batch_bytes: int) -> Iterator[_Batch]:
    """Yields all rows in the order of their tensors' names. A row longer than a batch has its own batch."""
    rows: list[_Rows] = []
    start = end = num_bytes = 0
    for name in sorted(spans):
        tensor = spans[name]
        row_bytes = tensor.num_bytes // tensor.shape[0]
        if rows and tensor.start != end:
            yield _Batch(start, rows, num_bytes)
            rows, num_bytes = [], 0
        first_row = 0
        while first_row < tensor.shape[0]:
            fitting = (batch_bytes - num_bytes) // row_bytes
            if fitting <= 0 and rows:
                yield _Batch(start, rows, num_bytes)
                rows, num_bytes = [], 0
                continue
            count = min(max(1, fitting), tensor.shape[0] - first_row)
            if not rows:
                start = tensor.start + first_row * row_bytes
            rows.append(_Rows(tensor, first_row, count, count * row_bytes))
            num_bytes += count * row_bytes
            first_row += count
        end = tensor.end
    if rows:
        yield _Batch(start, rows, num_bytes)


def _hash(batch: _Batch, content: memoryview, digest: AdapterHash, lines: Mapping[str, bytes]) -> None:
    pieces: list[bytes | memoryview] = []
    at = 0
    for rows in batch.rows:
        if rows.first_row == 0:
            pieces.append(lines[rows.tensor.name])
        pieces.append(content[at : at + rows.num_bytes])
        at += rows.num_bytes
    digest.update(*pieces)


def _pack(batch: _Batch, content: memoryview, made: Future[Packer]) -> None:
    packer = made.result()  # made before on the same thread
    at = 0
    for rows in batch.rows:
        values: npt.NDArray[Any] = np.frombuffer(content[at : at + rows.num_bytes], DTYPES[rows.tensor.dtype])
        packer.write(rows.tensor, rows.first_row, values.reshape(rows.num_rows, -1))
        at += rows.num_bytes


def _finish(buffer: bytearray, hashed: Future[None], packed: Future[None]) -> bytearray:
    """Waits until the buffer is hashed and packed, and returns it for reuse."""
    hashed.result()
    packed.result()
    return buffer


@dataclass(frozen=True, slots=True)
class _Parsed:
    """What the config and the header of a blob describe. Several loads may share it."""

    config: PeftConfig
    spans: Mapping[str, TensorSpan]  # by name, in the order of their bytes
    lines: Mapping[str, bytes]  # for each tensor, the line that is hashed before its bytes
    tensors: AdapterTensors[TensorSpan]
    layout: AdapterLayout  # of each rank's part
    digest_versions: tuple[int, ...]  # in the order in which they are tried


def _parse(
    config_json: bytes, header: bytes, body_bytes: int, partition: Partition, limits: AdapterLimits
) -> _Parsed:
    """Parses and checks the config and the header of a blob. Raises ValueError if this server cannot serve them."""
    config, reasons = parse_peft_config(config_json)
    if config is None or reasons:
        raise ValueError(_describe(reasons))
    spans = parse_spans(header, body_bytes)
    targets, reasons = resolve_targets(config, partition.shape)
    tensors, pair_reasons = validate(config, targets, spans, partition.shape, limits)
    reasons += pair_reasons
    if not reasons and {tensor.name for tensor in tensors.list_all()} != spans.keys():
        reasons.append(Reason("unknown_tensor", "it has tensors that no part of it uses"))
    if reasons:
        raise ValueError(_describe(reasons))
    lines = {name: AdapterHash.describe(span) for name, span in spans.items()}
    is_new = json.loads(config_json).get(DIGEST_FIELD) == DIGEST_VERSION
    versions = DIGEST_VERSIONS if is_new else DIGEST_VERSIONS[::-1]
    return _Parsed(config, spans, lines, tensors, tensors.lay_out(partition.rank_shape), versions)


# Most adapters of a server come from a few training recipes, so their configs and headers are equal byte for byte. For
# an adapter with 98 pairs, parsing and checking takes 12 ms, which is longer than reading and hashing 10 MB.
_NUM_KNOWN = 16
# Parsed, they take up to ten times their size in memory. Larger ones are not kept.
_KNOWN_BYTES = 256 << 10
_parse_known = lru_cache(_NUM_KNOWN)(_parse)


def _read_header(blob: Blob, limits: AdapterLimits) -> tuple[int, bytes, int]:
    """Returns the offset of the body, the header, and the size of the body. Raises ValueError if the header is too
    large.
    """
    file_bytes = _size(blob, TENSORS_NAME, limits.max_tensor_bytes)
    prefix = _read(blob, TENSORS_NAME, 0, min(PREFIX_BYTES, file_bytes))
    header_bytes = measure_header(prefix, file_bytes)
    body_start = PREFIX_BYTES + header_bytes
    header = bytes(_read(blob, TENSORS_NAME, PREFIX_BYTES, header_bytes))
    return body_start, header, file_bytes - body_start


def _size(blob: Blob, name: str, max_bytes: int) -> int:
    """Returns the size of a member. Raises ValueError if the member does not exist or is too large."""
    if name not in blob.members:
        raise ValueError(f"{name} is missing")
    if blob.members[name] > max_bytes:
        raise ValueError(
            f"{name} is {blob.members[name]} bytes long; this server accepts at most {max_bytes}"
        )
    return blob.members[name]


def _read(blob: Blob, name: str, start: int, num_bytes: int) -> memoryview:
    content = memoryview(bytearray(num_bytes))
    blob.read_into(name, start, content)
    return content


def _describe(reasons: list[Reason]) -> str:
    shown = "; ".join(reason.message for reason in reasons[:3])
    return shown if len(reasons) <= 3 else f"{shown}; and {len(reasons) - 3} more reasons"
