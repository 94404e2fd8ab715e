"""Downloads from the Hugging Face hub, through the hub's own client and its cache of snapshots.

The client reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE as usual. Only the files that slora reads are
requested, so pickles and code are never downloaded. The package huggingface_hub is a dependency of transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

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
from slora_adapters.peft.hub_reference import HubReference
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import MEMBER_NAMES


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
    with explained(reference, AdapterNotFound, StoreUnavailable):
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
def explained(
    reference: HubReference, missing: type[Exception], unavailable: type[Exception]
) -> Iterator[None]:
    """Turns the errors of the hub's client into errors that name the reference and the remedy.

    missing: the type of the error if the hub does not have the repository, or refuses access to it. unavailable: the
    type if the hub does not answer.
    """
    try:
        yield
    except GatedRepoError as error:
        raise missing(
            f"{reference} is gated: request access on the page of {reference.repo}, then set HF_TOKEN "
            "to your token"
        ) from error
    except RepositoryNotFoundError as error:
        raise missing(
            f"the hub has no repository {reference.repo}, or the repository is private; for a private "
            "one, set HF_TOKEN to a token that can read it"
        ) from error
    except RevisionNotFoundError as error:
        raise missing(f"{reference.repo} has no revision {reference.revision!r}") from error
    except HFValidationError as error:
        raise ValueError(f"{reference} is not a valid name on the hub: {error}") from error
    except LocalEntryNotFoundError as error:
        raise unavailable(
            f"the hub cannot be reached, and the cache of this machine does not have {reference}: "
            + _first_line(error.__cause__ or error)
        ) from error
    except Exception as error:  # the client's HTTP library, and so its exceptions, differ between releases
        raise unavailable(
            f"{reference} could not be downloaded from the hub: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error's message. The client's messages continue with links to documentation."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
