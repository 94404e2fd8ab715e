"""Reads an adapter as PEFT saves it, from a directory or from named byte strings.

Only four kinds of file are opened: the config, the safetensors file, and the optional texts beside them. Pickles
(`adapter_model.bin` and similar) are refused by name and never opened.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

from slora_adapters.errors import AdapterInvalid, AdapterNotFound, Reason
from slora_adapters.limits import AdapterLimits
from slora_adapters.peft.adapter import Adapter, AdapterExtras
from slora_adapters.peft.base_embeddings import find_copies, refuse_other_copies
from slora_adapters.peft.digest import adapter_digest
from slora_adapters.peft.extras import EXTRA_NAMES, read_extras
from slora_adapters.peft.module_names import find_image_part, find_other_names, rename_module
from slora_adapters.peft.peft_config import CONFIG_NAME, PeftConfig, parse_peft_config
from slora_adapters.peft.targeting import resolve_targets, spell_out
from slora_adapters.peft.tensor_file import StoredTensor, map_file, read_tensors
from slora_adapters.peft.validation import check_values, validate
from slora_kernels.layout import ModelShape

TENSORS_NAME = "adapter_model.safetensors"
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
    extras, extra_reasons = read_extras(members, limits)
    reasons += extra_reasons
    return _assemble(config, tensors, extras, reasons, shape, limits)


def assemble_adapter(
    raw_config: bytes, tensors: Mapping[str, StoredTensor], shape: ModelShape, limits: AdapterLimits
) -> Adapter:
    """Builds an adapter from tensors in memory, with the same checks as `read_adapter`. Raises AdapterInvalid with
    every reason to refuse it.
    """
    reasons: list[Reason] = []
    config = _parse_config(memoryview(raw_config), reasons)
    return _assemble(config, tensors, AdapterExtras(), reasons, shape, limits)


def _assemble(
    config: PeftConfig | None,
    tensors: Mapping[str, StoredTensor] | None,
    extras: AdapterExtras,
    reasons: list[Reason],
    shape: ModelShape,
    limits: AdapterLimits,
) -> Adapter:
    if config is None or tensors is None:
        raise _invalid(reasons)
    other = find_other_names(tensors, shape)
    targets, target_reasons = resolve_targets(config, other or shape)
    if other is not None:
        renamed = {name: rename_module(name, other, shape) for name in tensors}
        tensors = {renamed[name]: replace(tensor, name=renamed[name]) for name, tensor in tensors.items()}
    copies = find_copies(tensors, shape)
    image_parts = {name: part for name in tensors if (part := find_image_part(name)) is not None}
    own = {name: tensor for name, tensor in tensors.items() if name not in copies and name not in image_parts}
    pairs, pair_reasons = validate(targets, own, shape, limits, use_rslora=config.use_rslora)
    config, length_reasons = spell_out(config, targets, shape, all_fields=other is not None)
    reasons += [*target_reasons, *pair_reasons, *length_reasons]
    reasons += check_values(own.values(), limits)
    reasons += refuse_other_copies(
        (tensors[name] for name in sorted(copies)), shape, limits.base_directory, limits.served_dtype
    )
    if reasons:
        raise _invalid(reasons)
    if image_parts:
        parts = " and ".join(sorted({*image_parts.values()}))
        use = f"not {len(image_parts)} tensors of {parts}, which only images need, because this server reads text only"
        extras = replace(extras, uses=(*extras.uses, use))
    return Adapter(
        config,
        pairs,
        adapter_digest(config, own),
        extras,
        has_unused=bool(copies or image_parts),
        is_sorted=other is None and list(own) == sorted(own),
    )


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
            kept.append(Reason(code, f"and {len(found) - MAX_REASONS_PER_CODE} more errors of this kind"))
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
