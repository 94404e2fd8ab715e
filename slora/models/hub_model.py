"""Base models from the Hugging Face hub: only the files that slora reads, and first those that say whether it can.

A checkpoint can have hundreds of gigabytes. So config.json and the tokenizer come first, and a model that is not served
is refused before its weights are downloaded.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import DryRunError
from huggingface_hub.utils import tqdm

from slora.core.byte_text import format_bytes
from slora.core.errors import ConfigError
from slora.models.model_spec import read_model_spec
from slora.models.weights.checkpoint import INDEX_NAME, name_weight_files
from slora_adapters.peft.hub import explained
from slora_adapters.peft.hub_reference import HubReference
from slora_adapters.peft.peft_config import CONFIG_NAME as ADAPTER_CONFIG_NAME

# The files beside the weights that slora and transformers read.
_DESCRIPTIONS = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "additional_chat_templates/*.jinja", INDEX_NAME, ADAPTER_CONFIG_NAME,
]  # fmt: skip
# Room that stays free on the disk of the cache.
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class HubModel:
    """A base model whose files beside the weights are in `directory`, in the cache of the hub's client.

    reference: names the commit.
    """

    directory: Path
    reference: HubReference

    @staticmethod
    def find(reference: HubReference, model_impl: str = "auto") -> "HubModel":
        """Downloads the files beside the weights. Raises ConfigError if the hub does not have the model, refuses access
        to it or does not answer, or if slora does not serve the model.
        """
        root = _download(reference, _DESCRIPTIONS)
        model = HubModel(root, HubReference(reference.repo, root.name))
        if not (root / "config.json").is_file():
            if (root / ADAPTER_CONFIG_NAME).is_file():
                raise ConfigError(
                    f"{model.reference} is an adapter; serve the base model that its {ADAPTER_CONFIG_NAME} names, and "
                    f"add the adapter with `slora adapter push {reference}`"
                )
            raise ConfigError(
                f"{model.reference} has no config.json, so it is not a model that slora can read; if it has GGUF "
                f"files, name one of them, as in {reference.repo}/FILE.gguf"
            )
        read_model_spec(root, model_impl)
        return model

    def download_weights(self, tell: Callable[[str], Any] = lambda text: None) -> None:
        """Downloads the weights, unless the cache has them. Raises ConfigError.

        tell: called with a text for people before a download begins.
        """
        names = name_weight_files(self.directory)
        _download_large(self.reference, names, tell)
        for name in names:
            if not (self.directory / name).is_file():
                raise ConfigError(
                    f"{self.reference} has no {name}; only safetensors checkpoints are served, and pickles such as "
                    "pytorch_model.bin are never read"
                )


def download_gguf(reference: HubReference, tell: Callable[[str], Any] | None) -> Path:
    """Returns the GGUF file of the reference in the cache of the hub's client. Raises ConfigError. tell: see
    `HubModel.download_weights`.
    """
    assert reference.folder is not None
    path = _download_large(reference, [reference.folder], tell or (lambda text: None)) / reference.folder
    if not path.is_file():
        raise ConfigError(
            f"{HubReference(reference.repo, reference.revision)} has no file {reference.folder}"
        )
    return path


class _Bar(tqdm):  # type: ignore[misc]
    """The progress of the hub's client, on terminals only."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if not sys.stderr.isatty():
            options["disable"] = True
        super().__init__(*arguments, **options)


def missing_bytes(reference: HubReference, names: Sequence[str]) -> int:
    """Returns the size of those files that the cache does not have. 0 if the hub does not answer.

    Raises ConfigError.
    """
    with explained(reference, ConfigError, ConfigError):
        try:
            files = snapshot_download(
                reference.repo,
                revision=reference.revision,
                allow_patterns=list(names),
                library_name="slora",
                dry_run=True,
                tqdm_class=_Bar,
            )
        except DryRunError:
            return 0
    return sum(file.file_size or 0 for file in files if file.will_download)


def _download_large(reference: HubReference, names: Sequence[str], tell: Callable[[str], Any]) -> Path:
    """Downloads files unless the cache has them, if there is room for them."""
    if num_bytes := missing_bytes(reference, names):
        cache = Path(HF_HUB_CACHE)
        disk = next(path for path in (cache, *cache.parents) if path.is_dir())
        free = shutil.disk_usage(disk).free
        if num_bytes + _SPARE_BYTES > free:
            raise ConfigError(
                f"the weights of {reference} have {format_bytes(num_bytes)}, but the disk of {cache} has "
                f"{format_bytes(free)} free; make room, or set HF_HOME to a directory of a larger disk"
            )
        tell(f"downloading {format_bytes(num_bytes)} of {reference}")
    return _download(reference, names)


def _download(reference: HubReference, names: Sequence[str]) -> Path:
    with explained(reference, ConfigError, ConfigError):
        return Path(
            snapshot_download(
                reference.repo,
                revision=reference.revision,
                allow_patterns=list(names),
                library_name="slora",
                tqdm_class=_Bar,
            )
        )
