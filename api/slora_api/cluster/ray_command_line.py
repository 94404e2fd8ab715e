"""What `slora deploy` and `slora cluster` ask of the process that talks to Ray."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RayCommand:
    """name: deploy, status or stop. texts: the settings that were given, by name, which may contain passwords.

    address: HOST:PORT of Ray's head, or auto. host: see `Deployment`. as_json: whether to print JSON.
    """

    name: str
    texts: Mapping[str, str]
    address: str
    host: str | None = None
    as_json: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RayCommand":
        return RayCommand(**json.loads(text))
