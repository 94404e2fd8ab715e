"""Downloads adapters from the Hugging Face hub, through the hub's own client and its cache of snapshots.

The client reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE as usual. Only the files of an adapter are
requested, so pickles are never downloaded. The package huggingface_hub is a dependency of transformers.

A reference is hf://ORG/REPO[@REVISION][/FOLDER].
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from slora_adapters.errors import AdapterNotFound, StoreUnavailable
from slora_adapters.peft.adapter import TENSORS_NAME
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import MEMBER_NAMES

_PREFIX = "hf://"
_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.))*"
# A revision such as refs/pr/1 is written refs%2Fpr%2F1.
_REFERENCE = re.compile(rf"({_WORD}/{_WORD})(?:@([^/@]+))?(?:/({_WORD}(?:/{_WORD})*))?/?", re.ASCII)
_REVISION = re.compile(rf"{_WORD}(?:/{_WORD})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A reference to an adapter on the hub."""

    repo: str
    revision: str | None = None  # a branch, a tag or a commit; None is the main branch
    folder: str | None = None  # the adapter's folder in the repository

    @staticmethod
    def parse(text: str) -> "HubReference | None":
        """Parses a reference. Returns None if the text does not begin with hf://. Raises ValueError if the text begins
        with hf:// but is not a valid reference.
        """
        if not text.startswith(_PREFIX):
            return None
        match = _REFERENCE.fullmatch(text.removeprefix(_PREFIX))
        revision = unquote(match[2]) if match and match[2] else None
        if match is None or (revision is not None and not _REVISION.fullmatch(revision)):
            raise ValueError(
                f"{text[:200]!r} is not a reference to an adapter on the hub; write "
                "hf://ORG/REPO[@REVISION][/FOLDER]"
            )
        return HubReference(match[1], revision, match[3])

    def __str__(self) -> str:
        revision = "" if self.revision is None else "@" + self.revision.replace("/", "%2F")
        folder = "" if self.folder is None else "/" + self.folder
        return f"{_PREFIX}{self.repo}{revision}{folder}"

    @property
    def name(self) -> str:
        """The default name of the adapter: the last part of its folder, or of its repository."""
        return (self.folder or self.repo).rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """The files of an adapter in a local directory. `reference` names the commit of these files."""

    directory: Path
    reference: HubReference


def download(reference: HubReference) -> HubSnapshot:
    """Downloads the files of one adapter into the local cache of the hub's client, unless the cache has them.

    Raises AdapterNotFound if the hub does not have the adapter or refuses access to it. Raises StoreUnavailable if the
    hub does not answer and the cache does not have the adapter. Raises ValueError if the reference is not valid on the
    hub.
    """
    prefix = f"{reference.folder}/" if reference.folder else ""
    with _explained(reference):
        root = snapshot_download(
            reference.repo,
            revision=reference.revision,
            allow_patterns=[prefix + name for name in MEMBER_NAMES],
            library_name="slora",
        )
    # The cache names the folder of a snapshot after its commit.
    pinned = replace(reference, revision=Path(root).name)
    directory = Path(root) / prefix
    missing = [name for name in (CONFIG_NAME, TENSORS_NAME) if not (directory / name).is_file()]
    if missing:
        raise AdapterNotFound(
            f"{pinned} has no {' and no '.join(missing)} (or the connection to the hub failed before "
            "the download). A PEFT adapter has both files. Pickles such as adapter_model.bin are "
            "never read."
        )
    return HubSnapshot(directory, pinned)


@contextmanager
def _explained(reference: HubReference) -> Iterator[None]:
    try:
        yield
    except GatedRepoError as error:
        raise AdapterNotFound(
            f"{reference} is gated: request access on the page of {reference.repo}, then set HF_TOKEN "
            "to your token"
        ) from error
    except RepositoryNotFoundError as error:
        raise AdapterNotFound(
            f"the hub has no repository {reference.repo}, or the repository is private; for a private "
            "one, set HF_TOKEN to a token that can read it"
        ) from error
    except RevisionNotFoundError as error:
        raise AdapterNotFound(f"{reference.repo} has no revision {reference.revision!r}") from error
    except HFValidationError as error:
        raise ValueError(f"{reference} is not a valid name on the hub: {error}") from error
    except LocalEntryNotFoundError as error:
        raise StoreUnavailable(
            f"the hub cannot be reached, and the cache of this machine does not have {reference}: "
            + _first_line(error.__cause__ or error)
        ) from error
    except Exception as error:  # the client's HTTP library, and so its exceptions, differ between releases
        raise StoreUnavailable(
            f"{reference} could not be downloaded from the hub: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error's message. The client's messages continue with links to documentation."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
