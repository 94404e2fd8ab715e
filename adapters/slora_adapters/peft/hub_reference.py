"""References to adapters on the Hugging Face hub: hf://ORG/REPO[@REVISION][/FOLDER].

slora only imports adapters from the hub. `hub_snapshot.download` downloads the adapter that a reference names.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote

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
