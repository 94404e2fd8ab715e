"""Reads an adapter as PEFT saves it, from a directory or from named byte strings.

Only four kinds of file are opened: the config, the safetensors file, and the optional texts beside them. Pickles
(`adapter_model.bin` and similar) are refused by name and never opened.
"""

import json
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np

from slora_adapters.errors import AdapterInvalid, AdapterNotFound, Reason, abbreviate, count_nouns
from slora_adapters.peft.adapter import TENSORS_NAME, Adapter, AdapterExtras, AdapterLimits, adapter_digest
from slora_adapters.peft.experts import find_spelling, join_experts
from slora_adapters.peft.extras import EXTRA_NAMES, add_labels, read_extras
from slora_adapters.peft.peft_config import CONFIG_NAME, PeftConfig, parse_peft_config, refuse_bad_combination
from slora_adapters.peft.targeting import list_idle_names, resolve_targets, save_tied_head, spell_out
from slora_adapters.peft.tensor_file import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    STORED_NAMES,
    StoredTensor,
    convert,
    map_file,
    read_shaped,
    read_tensors,
)
from slora_adapters.peft.validation import (
    INDEXER,
    PEFT_PREFIX,
    check_tied_tensors,
    check_values,
    explain_resize,
    find_other_names,
    find_other_part,
    ignore_saved_parts,
    is_saved,
    is_tied_rows,
    list_spellings,
    name_rows,
    parse_copy_name,
    parse_rows_name,
    parse_saved_part,
    rename_module,
    stands_for,
    validate,
)
from slora_kernels.layout import ModelShape

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Safetensors dtype name -> the name that `convert` expects.
_SERVED = {stored: served for served, stored in STORED_NAMES.items()}
# Rows compared at a time, so that a conversion needs little memory and stops at the first difference.
_ROWS = 1024


def find_copies(tensors: Mapping[str, StoredTensor], shape: ModelShape) -> frozenset[str]:
    """Returns the names of the tensors that have the name of the base model's embedding or head."""
    return frozenset(name for name in tensors if parse_copy_name(name, shape) is not None)


def refuse_other_copies(
    copies: Iterable[StoredTensor], shape: ModelShape, base_directory: Path | None, served_dtype: str | None
) -> Iterable[Reason]:
    """Yields a reason to refuse the adapter for each copy of a base parameter that differs or cannot be compared.

    PEFT saves the embedding and the head with an adapter that targets either of them (`save_embedding_layers="auto"`),
    trained or not. A head such as Phi's or CTRL's has a bias, which is saved too. When PEFT loads the adapter, the
    copies replace the base model's parameters. A copy that differs means that the adapter was trained on another base
    model or with added tokens. Such an adapter would need its own embedding matrix, which is not supported.

    Each copy is compared with the checkpoint in the dtype that is served, in which PEFT would use it. An accepted copy
    is neither part of the digest nor stored.

    served_dtype: None stands for the dtype of the checkpoint.
    """
    for tensor in copies:
        why = _compare(tensor, shape, base_directory, served_dtype)
        if why is not None:
            code = "bias" if _is_bias(tensor.name) else "embeddings"
            yield Reason(code, f"tensor {tensor.name[:120]!r} {why}")


def take_added_rows(
    config: PeftConfig, tensors: Mapping[str, StoredTensor], shape: ModelShape, limits: AdapterLimits
) -> tuple[PeftConfig, Mapping[str, StoredTensor], list[Reason]]:
    """Turns copies of a resized embedding and head into rows of their own (trainable_token_indices).

    PEFT saves whole copies after `resize_token_embeddings`. Only the rows behind those of the base model are kept,
    beside the trained rows. The rows before them must equal the base's.
    """
    tensors = _drop_repeated(config, tensors, shape)
    resized: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        path = (parse_copy_name(name, shape) or "").removesuffix(".weight")
        is_copy = path in (shape.embedding_path, shape.head_path) and not is_saved(path, config)
        if is_copy and shape.count_added_rows(tensor.shape):
            resized[path] = tensor
    if not resized:
        return config, tensors, []
    reasons = [*_compare_resized(resized, shape, limits)]
    kept = {name: tensor for name, tensor in tensors.items() if tensor not in resized.values()}
    indices = list(config.token_indices)
    if shape.ties_head and shape.embedding_path in resized:
        resized.pop(shape.head_path, None)
        if is_tied_rows(_index_rows(config, shape), shape):
            indices = [entry for entry in indices if not stands_for(entry[0], shape.head_path, shape)]
    for path, tensor in resized.items():
        entry = next((entry for entry in indices if stands_for(entry[0], path, shape)), (path, ()))
        rows = {shape.vocab_size + place: row for place, row in enumerate(tensor.values[shape.vocab_size :])}
        dtype = tensor.dtype
        trained = next((name for name in kept if parse_rows_name(name) == path), None)
        if trained is not None:
            own = kept.pop(trained)
            expected = (len(entry[1]), shape.hidden_size)
            if own.shape != expected:
                message = f"tensor {trained[:120]!r} has shape {list(own.shape)}; the config requires {list(expected)}"
                return config, tensors, [*reasons, Reason("shape_mismatch", message)]
            if own.dtype != dtype:
                rows = {token: convert(row, dtype, "float32") for token, row in rows.items()}
                own_rows, dtype = convert(own.values, own.dtype, "float32"), STORED_NAMES["float32"]
            else:
                own_rows = own.values
            rows |= dict(zip(entry[1], own_rows, strict=True))
        ids = tuple(sorted(rows))
        if entry in indices:
            indices[indices.index(entry)] = (entry[0], ids)
        else:
            indices.append((path, ids))
        name = name_rows(path)
        kept[name] = StoredTensor(name, dtype, np.stack([rows[token] for token in ids]))
    return replace(config, token_indices=tuple(indices)), kept, reasons


def _drop_repeated(
    config: PeftConfig, tensors: Mapping[str, StoredTensor], shape: ModelShape
) -> Mapping[str, StoredTensor]:
    """Drops what PEFT saves twice with a resized embedding and head: parts of modules in modules_to_save, and the rows
    of a tied head.
    """
    copies: dict[str | None, StoredTensor] = {}
    rows: dict[str | None, StoredTensor] = {}
    for name, tensor in tensors.items():
        copies[(parse_copy_name(name, shape) or "").removesuffix(".weight")] = tensor
        rows[parse_rows_name(name)] = tensor
    if not any(shape.count_added_rows(tensor.shape) for path, tensor in copies.items() if path):
        return tensors
    is_tied = is_tied_rows(_index_rows(config, shape), shape)
    repeated = set()
    for name, tensor in tensors.items():
        path, part = parse_saved_part(name, config, shape) or (None, None)
        if part == "original_module" or (part is not None and _repeats(tensor, copies.get(path))):
            repeated.add(name)
        is_head = is_tied and parse_rows_name(name) == shape.head_path
        if is_head and _repeats(tensor, rows.get(shape.embedding_path)):
            repeated.add(name)
    return {name: tensor for name, tensor in tensors.items() if name not in repeated}


def _index_rows(config: PeftConfig, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns the trained tokens of embedding and head by their paths."""
    return {
        path: ids
        for path in (shape.embedding_path, shape.head_path)
        for name, ids in config.token_indices
        if stands_for(name, path, shape)
    }


def _repeats(tensor: StoredTensor, other: StoredTensor | None) -> bool:
    return other is not None and tensor.dtype == other.dtype and np.array_equal(tensor.values, other.values)


def _compare_resized(
    resized: Mapping[str, StoredTensor], shape: ModelShape, limits: AdapterLimits
) -> Iterable[Reason]:
    for tensor in resized.values():
        before = replace(tensor, values=tensor.values[: shape.vocab_size])
        why = _compare(before, shape, limits.base_directory, limits.served_dtype)
        if why is not None:
            message = f"the first {shape.vocab_size} rows of tensor {tensor.name[:120]!r}: this copy {why}"
            yield Reason("embeddings", message)
    if len({tensor.shape for tensor in resized.values()}) > 1:
        yield Reason("embeddings", "the copies of embedding and head have different numbers of added rows")
    elif shape.ties_head and len(resized) > 1:
        first, second = (tensor.values[shape.vocab_size :] for tensor in resized.values())
        if not np.array_equal(first, second):
            yield Reason(
                "embeddings", "the base model ties its head to the embedding, but the copies of both differ"
            )


def _is_bias(name: str) -> bool:
    return name.endswith(".bias")


def _compare(
    tensor: StoredTensor, shape: ModelShape, base_directory: Path | None, served_dtype: str | None
) -> str | None:
    name = parse_copy_name(tensor.name, shape)
    if name is None or base_directory is None:
        return "holds a whole parameter, and the base model is not available here to compare it with"
    expected = (shape.vocab_size,) if _is_bias(name) else (shape.vocab_size, shape.hidden_size)
    if tensor.shape != expected:
        return f"has shape {list(tensor.shape)}, but the base model's has {list(expected)}" + (
            explain_resize(tensor, shape) or "; such a copy cannot be the base model's"
        )
    try:
        own = _read_base(base_directory, name, expected, shape)
    except (OSError, ValueError, KeyError) as error:
        return f"cannot be compared with the base model's: {error}"
    served = served_dtype or _SERVED[own.dtype]
    if _equal(tensor, own, served):
        return None
    for rounded in _SERVED.values():
        if _equal(tensor, own, served, rounded):
            return (
                f"is the base model's rounded to {rounded}, which PEFT would use in place of the base model's own in "
                f"{served}; save the adapter with save_pretrained(..., save_embedding_layers=False) to use the base "
                "model's own"
            )
    if _is_bias(name):
        return "differs from the base model's: a trained bias is not supported, or the adapter belongs to another base"
    return (
        "differs from the base model's: the adapter was trained with another embedding matrix, which "
        "this server cannot use instead of the base model's, or it belongs to another base"
    )


def _read_base(directory: Path, name: str, expected: tuple[int, ...], shape: ModelShape) -> StoredTensor:
    """Returns a parameter of the embedding or the head. Raises ValueError if the checkpoint does not have it."""
    found: dict[str, StoredTensor] = {}
    for file in _list_files(directory):
        found |= read_shaped(map_file(file), expected)
    own = _pick(found, name)
    if name == f"{shape.head_path}.weight":
        # Some checkpoints save the head under an older name. If the checkpoint has no head, the head is tied to the
        # embedding.
        embedding = _pick(found, f"{shape.embedding_path}.weight")
        others = [matrix for matrix in found.values() if matrix is not embedding]
        own = own or (others[0] if len(others) == 1 else embedding)
    if own is None:
        raise ValueError(f"{directory} has no tensor {name} {list(expected)}")
    return own


def _pick(found: Mapping[str, StoredTensor], name: str) -> StoredTensor | None:
    """Finds a tensor by one of its names, or by its name without the first part. Checkpoints saved from a class without
    a head, such as GPT-2's, lack that part.
    """
    names = [*list_spellings(name), name.partition(".")[2]]
    return next((found[spelling] for spelling in names if spelling in found), None)


def _list_files(directory: Path) -> Iterable[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return [directory / _SINGLE]
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [directory / Path(shard).name for shard in sorted(shards)]


def _equal(tensor: StoredTensor, own: StoredTensor, served: str, rounded: str | None = None) -> bool:
    """Returns whether the copy is the base's parameter in the dtype `served`. rounded: a dtype to which the parameter
    is rounded before it is compared.
    """
    for start in range(0, own.shape[0], _ROWS):
        expected, dtype = own.values[start : start + _ROWS], own.dtype
        if rounded is not None:
            expected, dtype = convert(expected, dtype, rounded), STORED_NAMES[rounded]
        copy = convert(tensor.values[start : start + _ROWS], tensor.dtype, served)
        if not np.array_equal(copy, convert(expected, dtype, served)):
            return False
    return True


# All files that an upload of an adapter may contain.
MEMBER_NAMES = (CONFIG_NAME, TENSORS_NAME, *EXTRA_NAMES)
# Names of files and folders that training leaves beside an adapter. They do not change what the adapter answers, or, as
# the older forms of a tokenizer, only repeat the other files. They are never opened.
_HARMLESS_FILES = (
    *(".*", "readme*", "license*", "notice*", "*.md", "*.txt", "*.log", "*.yaml", "*.yml", "*.toml", "*.ini"),
    *(
        "*.csv",
        "*.tsv",
        "*.jsonl",
        "*.html",
        "*.pdf",
        "*.png",
        "*.jpg",
        "*.jpeg",
        "*.gif",
        "*.svg",
        "*.py",
        "*.sh",
    ),
    *(
        "*.ipynb",
        "*state.json",
        "*args.json",
        "*log.json",
        "training_args.bin",
        "optimizer.*",
        "scheduler.*",
        "scaler.pt",
        "rng_state*.pth",
    ),
    *(
        "random_states_*.pkl",
        "*_optim_states.pt",
        "*_model_states.pt",
        "latest",
        "*_results.json",
        "eval_*.json",
    ),
    *("events.out.tfevents.*", "config.json", "vocab.json", "tokenizer.model", "spiece.model", "*.tiktoken"),
    *(
        "sentencepiece.bpe.model",
        "preprocessor_config.json",
        "processor_config.json",
        "*_preprocessor_config.json",
    ),
)
_HARMLESS_FOLDERS = (".*", "__macosx", "runs", "logs", "global_step*", "additional_chat_templates")
_CONVERT = "save the adapter with save_pretrained(directory, safe_serialization=True)"
# Pickle protocols 2 to 5, and the zip format in which newer torch stores its pickle.
_PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
# Maximum number of reasons reported per rule. An adapter that breaks a rule often breaks it in every layer.
MAX_REASONS_PER_CODE = 3


def read_adapter(directory: Path | str, shape: ModelShape, limits: AdapterLimits) -> Adapter:
    """Reads the adapter in a PEFT directory. Its tensors are views of the mapped file.

    Raises AdapterNotFound if the directory does not exist. Raises AdapterInvalid with every reason to refuse the
    adapter.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise AdapterNotFound(f"there is no adapter directory {str(directory)!r}")
    members = {name: map_file(directory / name) for name in MEMBER_NAMES if (directory / name).is_file()}
    if TENSORS_NAME not in members:
        pickles = refuse_pickles(path.name for path in sorted(directory.iterdir()))
        if pickles:
            raise _invalid(pickles)
    return parse_adapter(members, shape, limits)


def parse_adapter(members: Mapping[str, memoryview], shape: ModelShape, limits: AdapterLimits) -> Adapter:
    """Reads an adapter from the contents of its files. Raises AdapterInvalid with every reason to refuse the adapter.

    members: the content of each file, by file name.
    """
    reasons: list[Reason] = []
    config = _parse_config(members.get(CONFIG_NAME), reasons)
    tensors = _parse_tensors(members.get(TENSORS_NAME), limits, reasons)
    if config is None or tensors is None:
        raise _invalid([*reasons, *read_extras(members, limits)[1]])
    adapter = _assemble(config, tensors, reasons, shape, limits, members)
    # Stores keep no file with such a header, so the file is rewritten.
    has_long_header = int.from_bytes(members[TENSORS_NAME][:PREFIX_BYTES], "little") > MAX_HEADER_BYTES
    return replace(adapter, has_unused=True) if has_long_header else adapter


def assemble_adapter(
    raw_config: bytes, tensors: Mapping[str, StoredTensor], shape: ModelShape, limits: AdapterLimits
) -> Adapter:
    """Builds an adapter from tensors in memory, with the same checks as `read_adapter`. Raises AdapterInvalid with
    every reason to refuse it.
    """
    reasons: list[Reason] = []
    config = _parse_config(memoryview(raw_config), reasons)
    if config is None:
        raise _invalid(reasons)
    return _assemble(config, tensors, reasons, shape, limits)


def _assemble(
    config: PeftConfig,
    tensors: Mapping[str, StoredTensor],
    reasons: list[Reason],
    shape: ModelShape,
    limits: AdapterLimits,
    members: Mapping[str, memoryview] = MappingProxyType({}),
) -> Adapter:
    sent_config, sent_names = config, list(tensors)
    spelling = find_spelling(tensors, shape)
    if spelling is not None:
        config, tensors, expert_reasons = join_experts(config, tensors, spelling, shape, limits)
        if expert_reasons:
            raise _invalid([*reasons, *expert_reasons])
    other = find_other_names(tensors, shape)
    is_tied = config.ensure_weight_tying and shape.ties_head
    parts = {name: part for name in tensors if (part := find_other_part(name, other or shape)) is not None}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in parts}
    config = ignore_saved_parts(save_tied_head(config, shape), parts.keys(), shape)
    targets, target_reasons = resolve_targets(config, other or shape)
    named_shape = (other or shape) if spelling is None else spelling.shape
    unusual = list(_describe_names(sent_config, sent_names, parts, named_shape))
    if other is not None:
        renamed = {name: rename_module(name, other, shape) for name in tensors}
        tensors = {renamed[name]: replace(tensor, name=renamed[name]) for name, tensor in tensors.items()}
    uploaded = tensors
    config, tensors, resize_reasons = take_added_rows(config, tensors, shape, limits)
    copies = find_copies(tensors, shape)
    if config.bias != "none":
        copies = frozenset(name for name in copies if not _is_bias(name))
    saved = {f"{path}.weight" for path in (shape.embedding_path, shape.head_path) if is_saved(path, config)}
    copies = frozenset(name for name in copies if parse_copy_name(name, shape) not in saved)
    own = {name: tensor for name, tensor in tensors.items() if name not in copies}
    found, pair_reasons = validate(config, targets, own, shape, limits)
    if not pair_reasons and {tensor.name for tensor in found.list_all()} != own.keys():
        pair_reasons = [Reason("unknown_tensor", "the adapter has tensors that no part of it uses")]
    if is_tied and not pair_reasons and not target_reasons:
        pair_reasons += check_tied_tensors(found, shape)
    config, length_reasons = spell_out(config, targets, shape, all_fields=other is not None)
    extras = AdapterExtras()
    if members:
        extras, extra_reasons = read_extras(members, limits, found.num_added)
        reasons += extra_reasons
    if spelling is not None:
        extras = replace(extras, uses=(*extras.uses, "the linears of single experts, joined to one of all"))
    reasons += [*target_reasons, *resize_reasons, *pair_reasons, *length_reasons]
    reasons += [reason for reason in refuse_bad_combination(config) if reason not in reasons]
    reasons += check_values(own.values(), limits)
    reasons += refuse_other_copies(
        (tensors[name] for name in sorted(copies)), shape, limits.base_directory, limits.served_dtype
    )
    if not reasons:
        extras, reasons = add_labels(extras, members, found.vocabulary.num_rows[2], limits)
    if reasons:
        raise _invalid(reasons)
    extras = replace(extras, uses=(*extras.uses, *_describe_parts(list(parts.values())), *unusual))
    magnitudes = [pair for pair in found.pairs.values() if pair.magnitude is not None]
    b_biases = [pair for pair in found.pairs.values() if pair.b_bias is not None]
    counts = (
        (len(magnitudes), "module", "the DoRA magnitudes of {}"),
        (len(b_biases), "module", "the biases of lora_B of {}"),
        (found.vocabulary.num_rows[0], "row", "{} of the embedding"),
        (found.vocabulary.num_rows[1], "row", "{} of the head"),
        (found.num_added, "row", "{} behind the base model's, for added tokens"),
        (found.vocabulary.num_rows[2], "label", "a head for {}"),
        (len(found.norms), "norm", "the weights of {}, which replace those of the base model"),
        (len(found.biases), "module", "the trained biases of {}, which replace those of the base model"),
        (len(config.invocation), "invocation token", "{}, from which on the adapter is active"),
    )
    variants = [text.format(count_nouns(count, noun)) for count, noun, text in counts if count]
    extras = replace(extras, uses=(*extras.uses, *variants))
    return Adapter(
        config,
        found,
        adapter_digest(config, own),
        extras,
        has_unused=bool(copies or parts or tensors is not uploaded),
        is_sorted=other is None and spelling is None and list(own) == sorted(own),
    )


def _describe_parts(parts: Sequence[str]) -> Iterator[str]:
    """parts: that of each tensor that is left out."""
    num_indexers = parts.count(INDEXER)
    if num_indexers:
        why = "which select the tokens that attention reads: this server serves lengths at which they select all"
        yield f"not {count_nouns(num_indexers, 'tensor')} of indexers, {why}"
    others = [part for part in parts if part != INDEXER]
    if others:
        names = " and ".join(sorted({*others}))
        why = "which text does not reach, because this server reads text only"
        yield f"not {count_nouns(len(others), 'tensor')} of {names}, {why}"


def _describe_names(
    config: PeftConfig, tensor_names: Iterable[str], parts: Mapping[str, str], shape: ModelShape
) -> Iterator[str]:
    """Describes the names without effect in target_modules, and tensor names that PEFT's own loader does not read.

    parts: the tensors that are left out. shape: with the module names that the adapter has.
    """
    # Of paths in reverse, those with a common end are neighbours.
    left_out = sorted(f".{name.rpartition('.lora_')[0]}"[::-1] for name in parts)

    def is_left_out(name: str) -> bool:
        end = f".{name}"[::-1]
        place = bisect_left(left_out, end)
        return place < len(left_out) and left_out[place].startswith(end)

    idle = [name for name in list_idle_names(config, shape) if not is_left_out(name)]
    if idle:
        why = "which name no linear of the base model; the adapter has no tensors for them"
        yield f"not {abbreviate(idle)} in target_modules, {why}"
    bare = [name for name in tensor_names if name not in parts and not name.startswith(PEFT_PREFIX)]
    if bare:
        why = f"transformers reads them, but PEFT's own loader needs the prefix {PEFT_PREFIX}"
        yield f"{count_nouns(len(bare), 'tensor')} named like {abbreviate(bare[0])}: {why}"


def is_harmless(path: Sequence[str]) -> bool:
    """Returns whether a file that an adapter does not need may lie beside it. path: the parts of its path."""
    *folders, name = (part.lower() for part in path)
    if any(fnmatchcase(folder, pattern) for folder in folders for pattern in _HARMLESS_FOLDERS):
        return True
    return any(fnmatchcase(name, pattern) for pattern in _HARMLESS_FILES)


def refuse_pickles(names: Iterable[str]) -> list[Reason]:
    """Returns a reason for each file name that has a pickle suffix, because unpickling executes arbitrary code."""
    return [
        Reason("pickle", f"{name[:120]!r} is a pickle, which is never loaded; {_CONVERT}")
        for name in names
        if name.lower().endswith(_PICKLE_SUFFIXES)
    ]


def _invalid(reasons: list[Reason]) -> AdapterInvalid:
    by_code: dict[str, list[Reason]] = {}
    for reason in reasons:
        by_code.setdefault(reason.code, []).append(reason)
    kept: list[Reason] = []
    for code, found in by_code.items():
        kept += found[:MAX_REASONS_PER_CODE]
        if len(found) > MAX_REASONS_PER_CODE:
            rest = count_nouns(len(found) - MAX_REASONS_PER_CODE, "more error")
            kept.append(Reason(code, f"and {rest} of this kind"))
    return AdapterInvalid(tuple(kept))


def _parse_config(raw: memoryview | None, reasons: list[Reason]) -> PeftConfig | None:
    if raw is None:
        reasons.append(Reason("missing_file", f"{CONFIG_NAME} is missing"))
        return None
    config, found = parse_peft_config(raw)
    reasons += found
    return config


def _parse_tensors(
    raw: memoryview | None, limits: AdapterLimits, reasons: list[Reason]
) -> dict[str, StoredTensor] | None:
    if raw is None:
        reasons.append(Reason("missing_file", f"{TENSORS_NAME} is missing"))
        return None
    if len(raw) > limits.max_tensor_bytes:
        message = (
            f"{TENSORS_NAME} is {len(raw)} bytes long; this server accepts at most {limits.max_tensor_bytes}"
        )
        reasons.append(Reason("too_large", message))
        return None
    try:
        return read_tensors(raw)
    except ValueError as error:
        if _looks_pickled(raw):
            message = f"{TENSORS_NAME} is a pickle under another name, which is never loaded; {_CONVERT}"
            reasons.append(Reason("pickle", message))
        else:
            reasons.append(Reason("tensors_malformed", f"{TENSORS_NAME}: {error}"))
        return None


def _looks_pickled(raw: memoryview) -> bool:
    """Returns whether the file begins like the output of torch.save.

    A valid safetensors file begins with the length of its header, so it may begin with the same bytes. But then its
    header fits into the file. The first bytes of a pickle, read as a length, exceed the size of the file.
    """
    return bytes(raw[:4]).startswith(_PICKLE_STARTS) and int.from_bytes(raw[:8], "little") > len(raw)


# A file system's timestamps may be as coarse as one second. Two writes within one tick have the same timestamp, so an
# equal timestamp does not prove that a recently written file is unchanged.
_TICK_NS = 2_000_000_000

# Device, inode, size, mtime, ctime. A program cannot set the ctime back.
_FileState = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """The state of every file that affects an adapter's output. The state must be taken before the files are read."""

    files: tuple[_FileState | None, ...]
    read_ns: int

    @classmethod
    def read(cls, directory: Path) -> Self:
        read_ns = time.time_ns()
        return cls(tuple(_file_state(directory / name) for name in MEMBER_NAMES), read_ns)

    def proves_unchanged(self, earlier: "DirectoryState") -> bool:
        """Returns whether no file has changed since the earlier state was taken. Returns False if that is uncertain."""
        return self.files == earlier.files and earlier._is_settled()

    def _is_settled(self) -> bool:
        newest_ns = max((state[-1] for state in self.files if state is not None), default=0)
        return newest_ns + _TICK_NS < self.read_ns


def _file_state(path: Path) -> _FileState | None:
    try:
        found = os.stat(path)
    except OSError:  # a later read of the directory reports the error
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
