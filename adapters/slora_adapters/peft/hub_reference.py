"""An adapter on the Hugging Face hub, as people name it: hf://ORG/REPO[@REVISION][/FOLDER].

The hub is read, never written, and holds no blobs by digest: it is a place to import adapters from. Whoever takes the
directory of an adapter takes such a reference in its stead, by `download`ing it first.
"""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

__all__ = ["HubReference", "HubSnapshot"]

_PREFIX = "hf://"
_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.))*"
# refs/pr/1 is written refs%2Fpr%2F1.
_REFERENCE = re.compile(rf"({_WORD}/{_WORD})(?:@([^/@]+))?(?:/({_WORD}(?:/{_WORD})*))?/?", re.ASCII)
_REVISION = re.compile(rf"{_WORD}(?:/{_WORD})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubReference:
    """revision: a branch, a tag or a commit; None is the main branch. folder: of the adapter in the repository."""

    repo: str
    revision: str | None = None
    folder: str | None = None

    @staticmethod
    def parse(text: str) -> "HubReference | None":
        """None for what does not begin with hf://. Raises ValueError for what does and is no reference."""
        if not text.startswith(_PREFIX):
            return None
        match = _REFERENCE.fullmatch(text.removeprefix(_PREFIX))
        revision = unquote(match[2]) if match and match[2] else None
        if match is None or (revision is not None and not _REVISION.fullmatch(revision)):
            raise ValueError(
                f"{text[:200]!r} is not an adapter on the hub: hf://ORG/REPO[@REVISION][/FOLDER]"
            )
        return HubReference(match[1], revision, match[3])

    def __str__(self) -> str:
        revision = "" if self.revision is None else "@" + self.revision.replace("/", "%2F")
        folder = "" if self.folder is None else "/" + self.folder
        return f"{_PREFIX}{self.repo}{revision}{folder}"

    @property
    def name(self) -> str:
        """What the adapter's directory is called."""
        return (self.folder or self.repo).rsplit("/", 1)[-1]

    def download(self) -> "HubSnapshot":
        """Brings the files of the adapter, and no others, to this machine's cache, unless they are there.

        Raises AdapterNotFound for what the hub does not have or does not give us, StoreUnavailable if it is out of
        reach and the cache does not have it, ValueError without the package huggingface_hub.
        """
        try:
            module: Any = importlib.import_module("slora_adapters.peft.hub_snapshot")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{self} needs the package {error.name}, which comes with transformers: pip install huggingface_hub"
            ) from error
        snapshot: HubSnapshot = module.download(self)
        return snapshot


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """The files of an adapter in a directory here, as they were at one commit, which `reference` names."""

    directory: Path
    reference: HubReference
