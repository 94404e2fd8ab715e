"""Whether it matters how many adapters are registered: for a start, for a page of the list, for finding one by name.

All belong to one tenant. Their rows were made up and their blobs are links to one, since nobody loads them here; each
number of them has a server of its own on a tiny model, whose start hides nothing.

    wanted: with the most adapters, at most 1.25 times what it takes with the fewest
"""

import hashlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.table import Row
from bench.workload import ModelSize, make_adapter, write_model
from slora_adapters.adapter import AdapterExtras
from slora_adapters.adapter_record import AdapterDetails
from slora_adapters.database import Database
from slora_adapters.file_store import FileStore
from slora_adapters.registry import Registry
from slora_adapters.sqlite_storage import SqliteStorage
from slora_adapters.version import AdapterVersion
from tests.api.platform import bearer
from tests.api.served import CHARACTERS, Served, serving, write_tokenizer

COUNTS = (10, 500, 5000)
FACTOR = 1.25
_TENANT = "acme"
_TINY = ModelSize(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=len(CHARACTERS) + 1
)
_LOOKUPS = 500
_REQUESTS = 40
# As many as the fewest are: equal pages.
_PAGE = min(COUNTS)


@dataclass(frozen=True, slots=True)
class _Populated:
    """A data directory with so many adapters."""

    data_dir: Path
    names: list[str]


def many_tables(rounds: int, counts: Sequence[int] = COUNTS) -> dict[str, list[Row]]:
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        folder = Path(directory)
        write_model(folder / "model", torch.bfloat16, _TINY)
        write_tokenizer(folder / "model")
        populated = {count: _populate(folder / str(count), count) for count in counts}
        found: dict[int, list[Row]] = {count: [] for count in counts}
        for _ in range(rounds):
            for count, place in populated.items():
                found[count].append(_measure(folder / "model", place))
    columns = list(found[counts[0]][0])
    rows = [
        {"adapters": count} | {name: statistics.median(row[name] for row in seen) for name in columns}
        for count, seen in found.items()
    ]
    most = {name: rows[-1][name] / rows[0][name] for name in columns}
    return {
        "registered adapters": rows,
        f"{counts[-1]} adapters over {counts[0]}": [
            {"of": name, "times": ratio, "wanted": f"<= {FACTOR:g}", "verdict": _verdict(ratio)}
            for name, ratio in most.items()
        ],
    }


def _verdict(ratio: float) -> str:
    return "met" if ratio <= FACTOR else "MISSED"


def _populate(data_dir: Path, count: int) -> _Populated:
    data_dir.mkdir(mode=0o700)
    store = FileStore(data_dir / "adapters")
    first = _digest(0)
    store.put(first, make_adapter(4, torch.bfloat16, _TINY, seed=0))
    members = list(store.root.glob(f"blobs/*/{first}/*"))
    database = Database(data_dir / "slora.db")
    registry = Registry(SqliteStorage(database))
    details = AdapterDetails(4, ("q_proj", "v_proj"), 1 << 20, AdapterExtras(), 1 << 20)
    names = [f"adapter-{number:05}" for number in range(count)]
    for number, name in enumerate(names):
        digest = _digest(number)
        if number:
            blob = store.root / "blobs" / digest[:2] / digest
            blob.mkdir(parents=True)
            for member in members:
                os.link(member, blob / member.name)
        registry.put(name, AdapterVersion(_TENANT, digest), details)
    database.close()
    return _Populated(data_dir, names)


def _measure(model: Path, place: _Populated) -> Row:
    draw = random.Random(0)
    wanted = [draw.choice(place.names) for _ in range(_LOOKUPS)]
    start = time.perf_counter()
    with serving(model, place.data_dir) as served:
        served.wait_until_ready()
        ready_s = time.perf_counter() - start
        key = served.make_key(_TENANT)
        list_s, get_s = _ask(served, key, wanted[:_REQUESTS])
    database = Database(place.data_dir / "slora.db")
    registry = Registry(SqliteStorage(database))
    look_up_s = statistics.median(_seconds(lambda name=name: registry.get(_TENANT, name)) for name in wanted)
    database.close()
    return {
        "ready s": ready_s,
        "a page of the list ms": 1e3 * list_s,
        "one over HTTP ms": 1e3 * get_s,
        "one in the registry us": 1e6 * look_up_s,
    }


def _ask(served: Served, key: str, names: list[str]) -> tuple[float, float]:
    """Medians for a page of the list, and for one adapter."""
    with served.client(key) as client:
        client.headers.update(bearer(key))

        def get(path: str) -> float:
            return _seconds(lambda: client.get(path).raise_for_status())

        page = f"/v1/adapters?limit={_PAGE}"
        get(page)
        pages = [get(page) for _ in names]
        return statistics.median(pages), statistics.median(get(f"/v1/adapters/{name}") for name in names)


def _digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
