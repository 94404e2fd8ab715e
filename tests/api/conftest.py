import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest

from tests.adapters.registry_places import database_place
from tests.api.adapters.hostile_uploads import MAX_RANK, MAX_UPLOAD
from tests.api.platform import Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import READY_S, Served, serving, write_adapter, write_base
from tests.postgresql_server import mortal_postgresql, postgresql_server, shared_postgresql
from tests.redis_server import make_redis, redis_server, shared_redis
from tests.support.forked_sandboxes import start_child

__all__ = [
    "Kit",
    "database_place",
    "kit",
    "make_redis",
    "mortal",
    "mortal_postgresql",
    "postgresql_server",
    "redis_server",
    "server",
    "shared_postgresql",
    "shared_redis",
]


@dataclass(frozen=True)
class Kit:
    """A tiny base model and two adapters of it on disk. The small adapter also adapts the embedding and the head."""

    base: Path
    small: Path
    wide: Path


@pytest.fixture(scope="session", autouse=True)
def one_ca_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clients trust one CA instead of all. Loading all takes 30 ms for each client, and these tests use no TLS."""
    path = tmp_path_factory.mktemp("ca") / "one.pem"
    path.write_text(
        "".join(Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----")[:2]),
        encoding="utf-8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> Iterator[None]:
    """By default, httpx waits 5 s for an answer. A server on a busy machine may need longer."""
    default = inspect.signature(httpx.get).parameters["timeout"].default
    with pytest.MonkeyPatch.context() as patch:
        for phase in ("connect", "read", "write", "pool"):
            patch.setattr(default, phase, READY_S)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_sandboxes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start_child)
        yield


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    root = tmp_path_factory.mktemp("kit")
    write_base(root / "base")
    write_adapter(root / "small", seed=1, r=4, target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"])
    write_adapter(root / "wide", seed=2, r=16)
    return Kit(root / "base", root / "small", root / "wide")


@pytest.fixture(scope="module")
def start_platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Platform]]:
    """Starts an API that ends with the module. The arguments are those of `running_platform` after the directory."""
    with ExitStack() as stack:

        def start(engine: ScriptedEngine, **settings: Any) -> Platform:
            directory = tmp_path_factory.mktemp("platform")
            return stack.enter_context(running_platform(directory, engine, **settings))

        yield start


@pytest.fixture(scope="module")
def platform(start_platform: Callable[..., Platform]) -> Platform:
    """The API over a scripted engine, whose answer is "ok". A module that needs other settings has a fixture of its
    own."""
    return start_platform(ScriptedEngine([deltas_of(b"ok")]))


@pytest.fixture(scope="session")
def server(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that tests share, with the default kernels and the limits that hostile uploads exceed. Each test
    creates its own tenants, and no test kills a process."""
    limits = ("--max-upload-bytes", str(MAX_UPLOAD), "--max-lora-rank", str(MAX_RANK))
    with serving(kit.base, tmp_path_factory.mktemp("server") / "data", *limits, kernels="auto") as served:
        served.wait_until_ready()
        yield served


@pytest.fixture(scope="session")
def mortal(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose processes tests may kill or stop. Each test leaves it ready. For some seconds it reports a stall,
    so that a test on a busy machine sees the report."""
    with serving(kit.base, tmp_path_factory.mktemp("mortal") / "data", "--stall-seconds", "9") as served:
        served.wait_until_ready()
        yield served
