"""Whether it matters how many adapters are registered: for a start, for a page of the list, for finding one by name.

Once with the database of one host (SQLite) and once with that of several (PostgreSQL, where each lookup is a round
trip; a server answers from memory what it was asked before). All belong to one tenant. Their rows were made up and
their blobs are links to one, since nobody loads them here; each number of them has a server of its own on a tiny model,
whose start hides nothing.

    wanted: with the most adapters, at most 1.25 times what it takes with the fewest
"""

import hashlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.table import Row
from bench.workload import ModelSize, make_adapter, write_model
from slora_adapters.database.database import Database
from slora_adapters.process.progress_bar import track_progress
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.store.file_store import FileStore
from slora_adapters.version import AdapterVersion
from tests.api.platform import bearer, open_tenant_store
from tests.api.served import CHARACTERS, Served, serving, write_tokenizer
from tests.postgresql_server import running_postgresql

SQLITE, POSTGRESQL = "SQLite", "PostgreSQL"
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
    """A data directory with so many adapters of one tenant.

    database: its URL, or empty for the file there. tenant: the id.
    """

    data_dir: Path
    database: str
    names: list[str]
    tenant: str

    @contextmanager
    def registry(self) -> Iterator[Registry]:
        with _opened(self.data_dir, self.database) as database:
            yield Registry(database)


def _opened(data_dir: Path, url: str) -> closing[Database]:
    return closing(Database(url or data_dir / "slora.db"))


def many_tables(rounds: int, counts: Sequence[int] = COUNTS) -> dict[str, list[Row]]:
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        folder = Path(directory)
        write_model(folder / "model", torch.bfloat16, _TINY)
        write_tokenizer(folder / "model")
        with running_postgresql() as server:
            urls = {
                SQLITE: [""] * len(counts),
                POSTGRESQL: [server.make_database() for _ in counts],
            }
            populated = {
                (kind, count): _populate(folder / f"{kind}-{count}", count, url)
                for kind in urls
                for count, url in zip(counts, urls[kind], strict=True)
            }
            found: dict[tuple[str, int], list[Row]] = {which: [] for which in populated}
            for _ in track_progress("Rounds", range(rounds), "round"):
                for which, place in populated.items():
                    found[which].append(_measure(folder / "model", place))
    columns = list(found[SQLITE, counts[0]][0])
    medians = {
        which: {name: statistics.median(row[name] for row in seen) for name in columns}
        for which, seen in found.items()
    }
    return {
        "registered adapters": [
            {"database": kind, "adapters": count} | row for (kind, count), row in medians.items()
        ],
        f"{counts[-1]} adapters over {counts[0]}": [
            _compare(kind, name, medians[kind, counts[-1]][name] / medians[kind, counts[0]][name])
            for kind in (SQLITE, POSTGRESQL)
            for name in columns
        ],
    }


def _compare(kind: str, name: str, ratio: float) -> Row:
    return {
        "database": kind,
        "of": name,
        "times": ratio,
        "wanted": f"<= {FACTOR:g}",
        "verdict": _verdict(ratio),
    }


def _verdict(ratio: float) -> str:
    return "met" if ratio <= FACTOR else "MISSED"


def _populate(data_dir: Path, count: int, url: str) -> _Populated:
    data_dir.mkdir(mode=0o700)
    store = FileStore(data_dir / "adapters")
    first = _digest(0)
    store.put(first, make_adapter(4, torch.bfloat16, _TINY, seed=0))
    members = list(store.root.glob(f"blobs/*/{first}/*"))
    details = AdapterDetails(4, ("q_proj", "v_proj"), 1 << 20, 1 << 20)
    with _opened(data_dir, url) as database:
        tenant = open_tenant_store(database, data_dir).create_tenant(_TENANT).tenant_id
    place = _Populated(data_dir, url, [f"adapter-{number:05}" for number in range(count)], tenant)
    with place.registry() as registry:
        for number, name in enumerate(place.names):
            digest = _digest(number)
            if number:
                blob = store.root / "blobs" / digest[:2] / digest
                blob.mkdir(parents=True)
                for member in members:
                    os.link(member, blob / member.name)
            registry.put(name, AdapterVersion(tenant, digest), details)
    return place


def _measure(model: Path, place: _Populated) -> Row:
    draw = random.Random(0)
    wanted = [draw.choice(place.names) for _ in range(_LOOKUPS)]
    start = time.perf_counter()
    shared = ("--database", place.database, "--store", str(place.data_dir / "adapters"))
    flags = shared if place.database else ()
    with serving(model, place.data_dir, *flags) as served:
        served.wait_until_ready()
        ready_s = time.perf_counter() - start
        key = served.make_key(_TENANT)
        list_s, get_s = _ask(served, key, wanted[:_REQUESTS])
    with place.registry() as registry:
        look_up_s = statistics.median(
            _seconds(lambda name=name: registry.aliases(place.tenant, name)) for name in wanted
        )
    return {
        "ready s": ready_s,
        "a page of the list ms": 1e3 * list_s,
        "one over HTTP ms": 1e3 * get_s,
        "one in the database us": 1e6 * look_up_s,
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
