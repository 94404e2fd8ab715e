"""A validated adapter, its digest, and its summary.

An adapter is independent of pages and files. Its tensors are views of the memory that they were read from, and keep
this memory alive.

The digest is BLAKE3 over everything that changes the arithmetic, and nothing else. The hash first covers the config's
fields as sorted JSON, after `targeting.spell_out`. Pattern tables are lists of pairs, because their order decides which
pattern wins. Then it covers each tensor in name order: a JSON list of name, dtype and shape in one line, and the
tensor's bytes. Every part has a known length, so two different adapters never hash the same bytes. The hash does not
cover provenance, file names, safetensors metadata or the chat template. Two uploads that differ only in these have the
same digest.

Untrusted tensors are opened only in a separate process (`inspection_process.py`), which returns a `CheckedAdapter`:
the adapter without its tensors, as `StoredAdapters.store_blob` and `StoredAdapters.commit` need it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from slora_adapters.peft.peft_config import CONFIG_NAME, DIGEST_FIELD, PeftConfig
from slora_adapters.peft.tensor_file import Factor, StoredTensor, convert, tensor_file_parts
from slora_kernels.layout import AdapterLayout, Affine, ModelShape, lay_out_adapter, name_module

# Index of an adaptable module in `ModelShape.modules`, and in every table with a module axis.
ModuleId = int
TENSORS_NAME = "adapter_model.safetensors"


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


AnyFactor = TypeVar("AnyFactor", bound=Factor)


@dataclass(frozen=True, slots=True)
class LoraPair(Generic[AnyFactor]):
    """The delta of one linear: `scale * b @ a`, with a [rank, in width] and b [out width, rank].

    Of a linear of E experts, the rows of a are those of expert 0, then those of expert 1, and so on. The columns of b
    are the first ones of all experts, then the second ones, and so on (PEFT's order).

    With DoRA, each row of the weight plus its delta is also scaled so that its norm is the row's magnitude.

    is_transposed: it is the delta of the transposed weight, with a [rank, out width] and b [in width, rank].
    """

    path: str  # path of the module from the model's root, as PEFT's patterns match it
    a: AnyFactor
    b: AnyFactor
    scale: float
    magnitude: AnyFactor | None = None  # [out width]
    b_bias: AnyFactor | None = None  # [out width], the bias of B. It is multiplied by the scale, too.
    num_experts: int = 1
    is_transposed: bool = False

    @property
    def rank(self) -> int:
        """The rank of the linear, or that of each expert."""
        return self.a.shape[0] // self.num_experts

    @property
    def tensors(self) -> list[AnyFactor]:
        return [tensor for tensor in (self.a, self.b, self.magnitude, self.b_bias) if tensor is not None]


@dataclass(frozen=True, slots=True)
class TrainedRows(Generic[AnyFactor]):
    """Trained rows [n, hidden] that replace those of the embedding or of the head."""

    tensor: AnyFactor
    token_ids: tuple[int, ...] | None  # One for each row; None if the rows are those of the whole vocabulary.


class Vocabulary(NamedTuple, Generic[AnyFactor]):
    """The rows of an adapter. With a tied head, those of embedding and head may be of one tensor."""

    embedding: TrainedRows[AnyFactor] | None = None
    head: TrainedRows[AnyFactor] | None = None
    # The adapter's own head that classifies texts, with a row [hidden] for each label.
    classifier: TrainedRows[AnyFactor] | None = None

    @property
    def tensors(self) -> list[AnyFactor]:
        return list({rows.tensor.name: rows.tensor for rows in self if rows is not None}.values())

    def count_added(self, vocab_size: int) -> int:
        """The number of tokens of embedding and head that follow those of the base model."""
        ends = (
            rows.tensor.shape[0] if rows.token_ids is None else 1 + max(rows.token_ids)
            for rows in self[:2]
            if rows is not None
        )
        return max(0, max(ends, default=0) - vocab_size)

    @property
    def num_rows(self) -> tuple[int, int, int]:
        embedding, head, classifier = (0 if rows is None else rows.tensor.shape[0] for rows in self)
        return embedding, head, classifier


class NormTensors(NamedTuple, Generic[AnyFactor]):
    """The trained weight [width] of a norm, and its bias [width] if the norm has one."""

    weight: AnyFactor
    bias: AnyFactor | None = None

    @property
    def tensors(self) -> list[AnyFactor]:
        return [tensor for tensor in self if tensor is not None]


class AdapterTensors(NamedTuple, Generic[AnyFactor]):
    """The tensors of an adapter."""

    pairs: Mapping[ModuleId, LoraPair[AnyFactor]]
    # Trained biases [out width] that replace those of the base model.
    biases: Mapping[ModuleId, AnyFactor]
    vocabulary: Vocabulary[AnyFactor]
    norms: Mapping[int, NormTensors[AnyFactor]] = MappingProxyType({})  # By index in `ModelShape.norms`.
    invocation: tuple[int, ...] = ()  # See `PeftConfig`.
    num_added: int = 0  # Rows of the vocabulary that follow those of the base model.

    def list_all(self) -> list[AnyFactor]:
        factors = (tensor for pair in self.pairs.values() for tensor in pair.tensors)
        of_norms = (tensor for norm in self.norms.values() for tensor in norm.tensors)
        return [*factors, *self.biases.values(), *self.vocabulary.tensors, *of_norms]

    def lay_out(self, shape: ModelShape) -> AdapterLayout:
        """Computes the layout of the adapter in pages, for a base model or a rank's part of it."""
        affine = {module_id: Affine(has_magnitude=False, replaces_bias=True) for module_id in self.biases}
        for module_id, pair in self.pairs.items():
            if pair.magnitude is not None or pair.b_bias is not None:
                affine[module_id] = Affine(pair.magnitude is not None, module_id in self.biases)
        ranks = list_ranks(self.pairs, shape)
        layout = lay_out_adapter(shape, ranks, affine, self.vocabulary.num_rows, self.norms.keys())
        return replace(layout, invocation=self.invocation, num_added=self.num_added)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AdapterExtras:
    """Texts of an adapter that do not change its arithmetic: a Jinja chat template, and sampling defaults as JSON."""

    chat_template: str | None = None
    generation_config: str | None = None
    # What these texts were made from, for people. It is known only when the files are read.
    uses: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A validated adapter. `digest` identifies its arithmetic, and does not cover `extras`."""

    config: PeftConfig
    tensors: AdapterTensors[StoredTensor]
    digest: str
    extras: AdapterExtras
    # Whether the uploaded file also has copies of the base model's embedding or head, factors of the part that reads
    # images, or a long header. Stores do not keep them.
    has_unused: bool = False
    # Whether the tensors in the uploaded file have the names of the base model's modules and are in name order.
    is_sorted: bool = True

    @property
    def max_rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The module names, such as "q_proj", that are adapted in at least one layer, in the model's order."""
        names = (name_module(self.pairs[module_id].path) for module_id in sorted(self.pairs))
        return tuple(dict.fromkeys(names))

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.values.nbytes for tensor in self.tensors.list_all())

    @property
    def pairs(self) -> Mapping[ModuleId, LoraPair[StoredTensor]]:
        return self.tensors.pairs

    def ranks(self, shape: ModelShape) -> list[int]:
        """Returns the rank of each module of the base model, as `lay_out_adapter` expects; 0 for modules that are not
        adapted.
        """
        return list_ranks(self.pairs, shape)


def list_ranks(pairs: Mapping[ModuleId, LoraPair[Any]], shape: ModelShape) -> list[int]:
    """Returns the rank of each module of the base model, 0 where not adapted."""
    return [pair.rank if (pair := pairs.get(m)) else 0 for m in range(shape.num_modules)]


DIGEST_VERSION = 2
# Digests of version 1 are SHA-256. Adapters that were registered with them keep them.
DIGEST_VERSIONS = (DIGEST_VERSION, 1)


# Copying longer pieces to join them would take longer than hashing each of them on its own.
_LONG_PIECE_BYTES = 64 << 10


class AdapterHash:
    """Computes the digest incrementally. Call it with the tensors in name order: `describe(tensor)`, then the tensor's
    bytes, in pieces of any size.

    Pass several pieces to one `update`, which joins them if they are short. Hashing a piece on its own takes as long as
    hashing tens of KB more, because it cannot be hashed as one tree with the pieces around it.

    version: one of `DIGEST_VERSIONS`.
    """

    def __init__(self, config: PeftConfig, version: int = DIGEST_VERSION) -> None:
        first = _line({DIGEST_FIELD: version, "config": _arithmetic_fields(config)})
        self._hash = blake3(first) if version == DIGEST_VERSION else hashlib.sha256(first)

    @staticmethod
    def describe(tensor: Factor) -> bytes:
        """Returns the line that is hashed before the tensor's bytes."""
        return _line([tensor.name, tensor.dtype, list(tensor.shape)])

    def update(self, *pieces: bytes | memoryview) -> None:
        if sum(map(len, pieces)) < len(pieces) * _LONG_PIECE_BYTES:
            pieces = (b"".join(pieces),)
        for piece in pieces:
            self._hash.update(piece)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


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


# Columns multiplied at a time. At rank 128, they take 8 MB in float64.
_COLUMNS = 1 << 13


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """A summary of all modules of the base model that share a name, such as q_proj."""

    adapted: int  # how many of the `total` modules the adapter changes
    total: int
    min_rank: int
    max_rank: int
    max_norm: float  # the greatest Frobenius norm of these modules' deltas


@dataclass(frozen=True, slots=True)
class Certificate:
    """A summary of an accepted adapter, which its owner can compare with the training run. An adapter that covers only
    half of the trained modules, or whose delta is zero in some modules, passes every check but is wrong.
    """

    modules: Mapping[str, ModuleSummary]  # summaries by module name, in the model's order
    base_modules: int  # number of adaptable modules of the base model
    pool_bytes: int  # size of the adapter in the page pool of an engine without tensor parallelism
    # Name of the base model in the config, without folders; None if the config has none.
    base_name: str | None

    @property
    def adapted(self) -> int:
        return sum(summary.adapted for summary in self.modules.values())

    @staticmethod
    def from_plain(fields: Mapping[str, Any]) -> "Certificate":
        """Rebuilds a certificate from `dataclasses.asdict` after a round trip through JSON."""
        modules = {name: ModuleSummary(**summary) for name, summary in fields["modules"].items()}
        return Certificate(**{**fields, "modules": modules})


def certify(adapter: Adapter, shape: ModelShape, base_name: str | None) -> Certificate:
    by_name: dict[str, list[LoraPair[StoredTensor] | None]] = {}
    for module_id, module in enumerate(shape.modules):
        by_name.setdefault(name_module(module.path), []).append(adapter.pairs.get(module_id))
    modules = {
        name: _summarise(found, len(pairs))
        for name, pairs in by_name.items()
        if (found := [pair for pair in pairs if pair is not None])
    }
    pool_bytes = adapter.tensors.lay_out(shape).num_bytes
    return Certificate(modules, shape.num_modules, pool_bytes, base_name)


def _summarise(found: list[LoraPair[StoredTensor]], total: int) -> ModuleSummary:
    ranks = [pair.rank for pair in found]
    # Four significant digits: the number is for people, and further digits depend on the machine's arithmetic.
    norm = float(f"{max(map(delta_norm, found)):.4g}")
    return ModuleSummary(len(found), total, min(ranks), max(ranks), norm)


def delta_norm(pair: LoraPair[StoredTensor]) -> float:
    """Returns the Frobenius norm of scale * B A without computing that matrix.

    It uses |BA|^2 = trace((B'B)(AA')), where both factors are [rank, rank].
    """
    count, square = pair.num_experts, 0.0
    for expert in range(count):
        rows = slice(expert * pair.rank, (expert + 1) * pair.rank)
        a = _gram(pair.a.values[rows], pair.a.dtype)
        b = _gram(pair.b.values[:, expert::count].T, pair.b.dtype)
        square += float(np.sum(a * b))
    # Rounding may leave a square slightly below zero.
    return abs(pair.scale) * float(np.sqrt(max(0.0, square)))


def _gram(rows: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """Returns rows @ rows.T, [rank, rank], in float64, because squares of float32 values may overflow in float32."""
    gram = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], _COLUMNS):
        block = _widen(rows[:, start : start + _COLUMNS], dtype)
        gram += block @ block.T
    return gram


def _widen(block: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    return convert(block, dtype, "float32").astype(np.float64)


Members = Mapping[str, Path | bytes]


def bundle(adapter: Adapter, directory: Path | str, scratch: Path) -> Members:
    """Returns the members to put into a store, for an adapter that `read_adapter` read from `directory`.

    A blob has two members: the config and the tensor file. The config is rewritten from the fields that change the
    arithmetic, and has the version of the digest. The uploaded tensor file is kept if its tensors are in name order and
    all of them are needed. Otherwise it is rewritten in name order, without the tensors that PEFT copied into it from
    the base model. The digest hashes tensors in name order too, so a loader can hash a blob while it reads the file
    sequentially.

    The key of a blob is the digest of the arithmetic, not of the bytes. The reader of a blob
    (`stored_adapter.py`) recomputes that digest from the bytes that it has read. So exactly the weights that will be
    served are verified. All blobs of one digest compute the same results, so tenants that upload the same weights share
    one stored blob. Data of one tenant (names, chat template, sampling defaults, origin) is kept in the registry.

    scratch: another directory, for a tensor file that has to be rewritten.
    """
    # The JSON is not sorted, because the order of patterns decides which pattern wins.
    config = json.dumps(adapter.config.to_json() | {DIGEST_FIELD: DIGEST_VERSION}, indent=1).encode()
    if adapter.has_unused or not adapter.is_sorted:
        with (scratch / TENSORS_NAME).open("xb") as file:
            file.writelines(tensor_file_parts(adapter.tensors.list_all()))
        return {CONFIG_NAME: config, TENSORS_NAME: scratch / TENSORS_NAME}
    return {CONFIG_NAME: config, TENSORS_NAME: Path(directory) / TENSORS_NAME}


_NUM_CANARY_TOKENS = 4


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """The summary of an adapter that passed the inspection."""

    digest: str
    rank: int  # the greatest rank of any module
    target_modules: tuple[str, ...]
    tensor_bytes: int  # size of the uploaded factors
    blob_bytes: int  # size of the blob in a store, including the config and the header of the tensor file
    extras: AdapterExtras
    certificate: Certificate
    config: str  # the config as a store keeps it
    # Path of the tensor file to store. The caller of the inspection decides how long the file exists.
    tensors: Path
    # Ids of tokens with which the canary's prompt ends, so that it shows an effect: the invocation, or a few tokens
    # whose embeddings the adapter changes most.
    canary_tokens: tuple[int, ...]

    @property
    def members(self) -> Members:
        """The members to put into a store."""
        return {CONFIG_NAME: self.config.encode(), TENSORS_NAME: self.tensors}

    @staticmethod
    def from_plain(fields: Mapping[str, Any]) -> "CheckedAdapter":
        """Rebuilds an adapter from `dataclasses.asdict` after a round trip through JSON, with paths as strings."""
        return CheckedAdapter(
            **{
                **fields,
                "target_modules": tuple(fields["target_modules"]),
                "extras": AdapterExtras(**fields["extras"] | {"uses": tuple(fields["extras"]["uses"])}),
                "certificate": Certificate.from_plain(fields["certificate"]),
                "tensors": Path(fields["tensors"]),
                "canary_tokens": tuple(fields["canary_tokens"]),
            }
        )


def summarise(
    adapter: Adapter, directory: Path, scratch: Path, shape: ModelShape, base_name: str | None = None
) -> CheckedAdapter:
    """Summarises an adapter that `read_adapter` read from `directory`.

    scratch: another directory, for a tensor file that has to be rewritten.
    """
    members = bundle(adapter, directory, scratch)
    config, tensors = members[CONFIG_NAME], members[TENSORS_NAME]
    assert isinstance(config, bytes) and isinstance(tensors, Path)
    return CheckedAdapter(
        adapter.digest,
        adapter.max_rank,
        adapter.target_modules,
        adapter.tensor_bytes,
        len(config) + tensors.stat().st_size,
        adapter.extras,
        certify(adapter, shape, base_name),
        config.decode(),
        tensors,
        _find_canary_tokens(adapter, shape),
    )


def _find_canary_tokens(adapter: Adapter, shape: ModelShape) -> tuple[int, ...]:
    """Returns the invocation, or a few tokens with rows of their own or with the largest columns of A.

    A token that did not occur in training has a zero column.
    """
    if adapter.config.invocation:
        return adapter.config.invocation
    rows = adapter.tensors.vocabulary.embedding
    if rows is not None and rows.token_ids is not None:
        # The base model, with which the canary compares, does not have the adapter's added tokens.
        known = [token for token in rows.token_ids if token < shape.vocab_size]
        return tuple(known[:_NUM_CANARY_TOKENS])
    pair = adapter.pairs.get(shape.embedding_module)
    if pair is None:
        return ()
    magnitudes = np.abs(convert(pair.a.values, pair.a.dtype, "float32")).max(axis=0)
    likely = np.argsort(magnitudes)[::-1][:_NUM_CANARY_TOKENS]
    return tuple(int(token) for token in likely if magnitudes[token] > 0)
