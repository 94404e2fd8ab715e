"""Names of repositories of the Hugging Face hub: hf://ORG/REPO[@REVISION][/FOLDER].

Nothing is downloaded here, so a process that only reads names need not import the hub's client, which takes 0.6 s.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote

from slora_adapters.errors import AdapterInvalid, AdapterNotFound, Reason, StoreUnavailable

_PREFIX = "hf://"
_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.))*"
# A revision such as refs/pr/1 is written refs%2Fpr%2F1.
_REFERENCE = re.compile(rf"({_WORD}/{_WORD})(?:@([^/@]+))?(?:/({_WORD}(?:/{_WORD})*))?/?", re.ASCII)
_REVISION = re.compile(rf"{_WORD}(?:/{_WORD})*", re.ASCII)
# A model's directory, or a file in it, in the cache of the hub's client.
_SNAPSHOT = re.compile(rf"models--({_WORD}?)--({_WORD})/snapshots/([0-9a-f]{{40}})(?:/(.+))?", re.ASCII)
# In the directory of a model that is read from a GGUF file: the link to the file.
GGUF_LINK = "model.gguf"


@dataclass(frozen=True, slots=True)
class HubReference:
    """A reference to an adapter or to a base model on the hub."""

    repo: str
    revision: str | None = None  # a branch, a tag or a commit; None is the main branch
    folder: str | None = None  # an adapter's folder in the repository, or a base model's GGUF file

    @staticmethod
    def parse(text: str) -> "HubReference | None":
        """Parses a reference. Returns None if the text does not begin with hf://. Raises ValueError if the text begins
        with hf:// but is not a valid reference.
        """
        if not text.startswith(_PREFIX):
            return None
        reference = _parse(text.removeprefix(_PREFIX))
        if reference is None:
            raise ValueError(
                f"{text[:200]!r} is not a reference to the hub; write hf://ORG/REPO[@REVISION][/FOLDER]"
            )
        return reference

    @staticmethod
    def of_model(model: Path) -> "HubReference | None":
        """Returns the repository of a base model. None for a directory that the hub's client did not download.

        model: ORG/REPO[@REVISION] or ORG/REPO[@REVISION]/FILE.gguf, also after hf://, or a directory. A directory of
            this name wins over a repository.
        """
        if model.is_dir():
            link = model / GGUF_LINK
            path = str(link.readlink() if link.is_symlink() else model.resolve())
            found = _SNAPSHOT.fullmatch(path[max(0, path.rfind("models--")) :])
            return HubReference(f"{found[1]}/{found[2]}", found[3], found[4]) if found else None
        # A path has no double slash.
        reference = _parse(str(model).removeprefix("hf:/"))
        is_model = reference is not None and (reference.folder is None or reference.is_gguf)
        return reference if is_model else None

    @property
    def is_gguf(self) -> bool:
        """Whether the reference names a GGUF file."""
        return self.folder is not None and self.folder.endswith(".gguf")

    def __str__(self) -> str:
        revision = "" if self.revision is None else "@" + self.revision.replace("/", "%2F")
        folder = "" if self.folder is None else "/" + self.folder
        return f"{_PREFIX}{self.repo}{revision}{folder}"

    @property
    def name(self) -> str:
        """The default name of an adapter: the last part of its folder, or of its repository."""
        return (self.folder or self.repo).rsplit("/", 1)[-1]


def _parse(text: str) -> HubReference | None:
    match = _REFERENCE.fullmatch(text)
    revision = unquote(match[2]) if match and match[2] else None
    if match is None or (revision is not None and not _REVISION.fullmatch(revision)):
        return None
    return HubReference(match[1], revision, match[3])


@dataclass(frozen=True, slots=True)
class DownloadTask:
    """An adapter to download for a tenant of a server, and the limits of the process."""

    reference: str
    directory: str  # an empty directory, which gets the files of the repository
    max_bytes: int  # limit of all files together
    min_bytes_per_s: int  # lowest average rate, after a grace period
    grace_s: int
    parent: int  # id of the process that waits for the answer

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def decode_download(line: bytes) -> HubReference:
    """Returns the reference with the commit that was downloaded. Raises the error of the download, or ValueError if the
    process ended before it had a result.
    """
    answer = json.loads(line)
    match answer["result"]:
        case "done":
            reference = HubReference.parse(answer["text"])
            assert reference is not None
            return reference
        case "too_large":
            raise AdapterInvalid((Reason("too_large", answer["text"]),))
        case "missing":
            raise AdapterNotFound(answer["text"])
        case _:
            raise StoreUnavailable(answer["text"])
