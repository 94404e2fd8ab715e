"""Downloads from the Hugging Face hub, through the hub's own client and its cache of snapshots.

The client reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE as usual. Only the files that slora reads are
requested, so pickles and code are never downloaded. The package huggingface_hub is a dependency of transformers.

A server downloads an adapter for a tenant in a process of its own: `slora_adapters.peft.hub JSON` prints a line of
JSON. The kernel limits its memory, CPU time, files and time, and the server kills it when the client leaves.
"""

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from slora_adapters.errors import AdapterInvalid, AdapterNotFound, Reason, StoreUnavailable
from slora_adapters.peft.adapter import TENSORS_NAME
from slora_adapters.peft.hub_reference import DownloadTask, HubReference
from slora_adapters.peft.pattern_process import die_with
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
    with explained(reference, AdapterNotFound, StoreUnavailable):
        root = snapshot_download(reference.repo, **_options(reference))
    # The cache names the folder of a snapshot after its commit.
    pinned = replace(reference, revision=Path(root).name)
    directory = Path(root) / (reference.folder or "")
    _check_members(directory, pinned)
    return HubSnapshot(directory, pinned)


def _options(reference: HubReference) -> dict[str, Any]:
    prefix = f"{reference.folder}/" if reference.folder else ""
    patterns = [prefix + name for name in MEMBER_NAMES]
    return {"revision": reference.revision, "allow_patterns": patterns, "library_name": "slora"}


def _check_members(directory: Path, pinned: HubReference) -> None:
    missing = [name for name in (CONFIG_NAME, TENSORS_NAME) if not (directory / name).is_file()]
    if missing:
        raise AdapterNotFound(
            f"{pinned} has no {' and no '.join(missing)} (or the connection to the hub failed before "
            "the download). A PEFT adapter has both files. Pickles such as adapter_model.bin are "
            "never read."
        )


@contextmanager
def explained(
    reference: HubReference,
    missing: type[Exception],
    unavailable: type[Exception],
    remedy: str = "set HF_TOKEN to a token that can read it",
) -> Iterator[None]:
    """Turns the errors of the hub's client into errors that name the reference and the remedy.

    missing: the type of the error if the hub does not have the repository, or refuses access to it. unavailable: the
    type if the hub does not answer. remedy: what to do if the hub refuses access.
    """
    try:
        yield
    except GatedRepoError as error:
        raise missing(
            f"{reference} is gated: request access on the page of {reference.repo}, then {remedy}"
        ) from error
    except RepositoryNotFoundError as error:
        raise missing(
            f"the hub has no repository {reference.repo}, or the repository is private; for a private one, {remedy}"
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


# The hub's client reads the list of the repository's files, of which a hostile repository may have a million.
_MEMORY_BYTES = 1 << 30
_CPU_SECONDS = 60
_SERVER_REMEDY = (
    "push it from a machine that can read it, or ask the operator for a file with a token (HF_TOKEN_PATH)"
)
_BYTES_PER_CPU_SECOND = 8 << 20


def _download_within(task: DownloadTask) -> HubReference:
    reference = HubReference.parse(task.reference)
    assert reference is not None
    directory = Path(task.directory)
    with explained(reference, AdapterNotFound, StoreUnavailable, _SERVER_REMEDY):
        try:
            planned = snapshot_download(
                reference.repo, **_options(reference), local_dir=directory, dry_run=True
            )
        except DryRunError as error:
            raise error.__cause__ or error from None
    num_bytes = sum(file.file_size or 0 for file in planned)
    if num_bytes > task.max_bytes:
        limit = f"this server's limit is {task.max_bytes} (max_upload_bytes)"
        text = f"the files of {reference} have {num_bytes} bytes, but {limit}"
        raise AdapterInvalid((Reason("too_large", text),))
    # By default, the signal ends the process.
    signal.alarm(task.grace_s + num_bytes // task.min_bytes_per_s)
    # A branch may move meanwhile, so the files are those of the commit that was examined.
    pinned = replace(reference, revision=planned[0].commit_hash) if planned else reference
    with explained(pinned, AdapterNotFound, StoreUnavailable, _SERVER_REMEDY):
        snapshot_download(pinned.repo, **_options(pinned), local_dir=directory)
    shutil.rmtree(directory / ".cache", ignore_errors=True)
    _check_members(directory / (pinned.folder or ""), pinned)
    return pinned


def _bound(task: DownloadTask) -> None:
    die_with(task.parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (task.max_bytes, task.max_bytes))
    cpu_seconds = _CPU_SECONDS + task.max_bytes // _BYTES_PER_CPU_SECOND
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    # Until the size is known.
    signal.alarm(task.grace_s)


def main() -> None:
    task = DownloadTask(**json.loads(sys.argv[1]))
    _bound(task)
    try:
        answer = {"result": "done", "text": str(_download_within(task))}
    except AdapterInvalid as error:
        answer = {"result": "too_large", "text": error.reasons[0].message}
    except (AdapterNotFound, ValueError) as error:
        answer = {"result": "missing", "text": str(error)}
    except StoreUnavailable as error:
        answer = {"result": "unavailable", "text": str(error)}
    print(json.dumps(answer), flush=True)
    # Threads of the client may still wait for the hub.
    os._exit(0)


if __name__ == "__main__":
    main()
