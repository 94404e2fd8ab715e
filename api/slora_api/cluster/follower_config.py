"""The configuration of a follower process, passed as one JSON object on its command line."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FollowerConfig:
    """Where the follower finds the replicas, and where it writes them.

    address: HOST:PORT of Ray's head, or auto for the Ray of this host. address_file: a file that contains the address,
    once Ray has started; None: use `address`.
    """

    cluster_name: str
    address: str
    address_file: Path | None
    replicas: Path

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def from_json(text: str) -> "FollowerConfig":
        raw = json.loads(text)
        address_file = None if raw["address_file"] is None else Path(raw["address_file"])
        return FollowerConfig(**{**raw, "replicas": Path(raw["replicas"]), "address_file": address_file})
