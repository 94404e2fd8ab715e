"""A server starts, answers, takes an upload and stops in every environment that an operator may give it."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import httpx
import psutil
import pytest

from slora_kernels import machine_limits as machine
from tests.api.platform import bearer
from tests.api.served import ADMIN_KEY, READY_S, SLORA, wait_for, write_adapter, write_base

ROOT = Path(__file__).parents[3]
# One for each run, because the limit of processes counts all processes of a user.
UNKNOWN_USER = 50_000 + os.getpid() % 10_000
# The text of a chat shows how the template's file was decoded.
_TEMPLATE = "{{ 'é→' | length }}{{ messages[0].content }}"
_DEAD = "http://127.0.0.1:9"
_HUB_TOKEN = "hf_the-operators-token"


@dataclass(frozen=True)
class Environment:
    """variables: None removes one. shell: how a shell runs the server, `"$@"`. wrappers: commands before it."""

    variables: Mapping[str, str | None] = field(default_factory=dict)
    shell: str = 'exec "$@"'
    wrappers: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    is_root_only: bool = False

    def __or__(self, other: "Environment") -> "Environment":
        return Environment(
            {**self.variables, **other.variables},
            other.shell if other.shell != Environment.shell else self.shell,
            (*self.wrappers, *other.wrappers),
            other.host if other.host != Environment.host else self.host,
            self.is_root_only or other.is_root_only,
        )


def as_unknown_user(*limits: str) -> Environment:
    """A user without a name and a home, who can read everything, because the tests' Python may belong to root."""
    user = ("--reuid", str(UNKNOWN_USER), "--regid", str(UNKNOWN_USER), "--clear-groups")
    capability = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    nameless = {name: None for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME")}
    return Environment(nameless, wrappers=("setpriv", *user, *capability, *limits), is_root_only=True)


BARRED = "/dev/null/home"
DIMENSIONS: dict[str, dict[str, Environment]] = {
    "locale": {
        "ascii": Environment({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        "latin-1": Environment({"LC_ALL": "xx_XX.ISO-8859-1", "LOCPATH": "LOCPATH"}),
    },
    "home": {
        "none": Environment({name: None for name in ("HOME", "XDG_CACHE_HOME")}),
        "barred": Environment({"HOME": BARRED, "XDG_CACHE_HOME": f"{BARRED}/cache", "TMPDIR": BARRED}),
    },
    "proxy": {
        "dead": Environment(
            {name: _DEAD for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY")}
        ),
        "kubernetes": Environment({"SLORA_SERVICE_HOST": "10.0.0.7", "SLORA_PORT_80_TCP_PROTO": "tcp"}),
    },
    "stdout": {
        "full": Environment(shell='exec "$@" >/dev/full'),
        "closed": Environment(shell='exec "$@" >&- 2>&- <&-'),
        "gone": Environment(shell='exec "$@" > >(head -1)'),
    },
    "user": {"unknown": as_unknown_user()},
    "processes": {"few": as_unknown_user("prlimit", "--nproc=24")},
    "address": {"ipv6": Environment(host="::")},
    "group": {"half": Environment(wrappers=("GROUP",))},
}
ALONE = {f"{name}-{value}": one for name, values in DIMENSIONS.items() for value, one in values.items()}
# The environment of the quick run, which has a value of many dimensions.
QUICK = ("locale-ascii", "home-barred", "stdout-full", "proxy-dead", "address-ipv6")
PAIRS = {
    f"{first}+{second}": (first, second)
    for first, second in combinations(ALONE, 2)
    if first.partition("-")[0] != second.partition("-")[0]
    and {"user-unknown", "processes-few"} != {first, second}
}


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    """The base model, an adapter, and a locale of Latin-1 if this machine can make one. Every user can read them,
    unlike the directories of pytest.
    """
    with TemporaryDirectory(prefix="slora-environments-") as directory:
        write_files(folder := Path(directory))
        yield folder


def write_files(folder: Path) -> None:
    folder.chmod(0o755)
    write_base(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    write_adapter(folder / "adapter", seed=1)
    (folder / "locales").mkdir()
    if shutil.which("localedef") is not None:
        place = folder / "locales" / "xx_XX.ISO-8859-1"
        subprocess.run(["localedef", "-i", "en_US", "-f", "ISO-8859-1", place], capture_output=True)


@contextmanager
def own_group() -> Iterator[tuple[str, ...]]:
    """A control group with half a CPU. The command to enter it is empty if this user cannot make one."""
    for group in machine.find_groups(Path("/"), "cpu"):
        directory = group / f"slora-environments-{os.getpid()}"
        try:
            directory.mkdir()
        except OSError:
            continue
        try:
            for name, text in (("cpu.max", "50000 100000"), ("cpu.cfs_quota_us", "50000")):
                if (directory / name).exists():
                    (directory / name).write_text(text, encoding="utf-8")
            yield ("bash", "-c", f'echo $$ > {directory}/cgroup.procs; exec "$@"', "bash")
        finally:
            processes = directory / "cgroup.procs"
            wait_for(partial(is_empty, processes))
            directory.rmdir()
        return
    yield ()


def is_empty(file: Path) -> bool | None:
    return not file.read_text(encoding="utf-8").strip() or None


def check_environment(files: Path, wanted: Environment) -> None:
    if wanted.is_root_only and (os.geteuid() != 0 or shutil.which("setpriv") is None):
        pytest.skip("only root can become another user")
    if wanted.is_root_only and not all(path.stat().st_mode & stat.S_IXOTH for path in (ROOT, *ROOT.parents)):
        # The capability does not count for access(2), with which Alembic looks for its directory.
        pytest.skip(f"another user cannot enter {ROOT}")
    if "LOCPATH" in wanted.variables and not any((files / "locales").iterdir()):
        wanted = wanted | Environment({"LC_ALL": "C", "PYTHONIOENCODING": "latin-1"})
    if wanted.host == "::" and not socket.has_dualstack_ipv6():
        wanted = wanted | Environment(host="0.0.0.0")
    data_dir = Path(mkdtemp(dir=files))
    data_dir.chmod(0o777)
    family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
    with socket.create_server((wanted.host, 0), family=family) as free:
        port = free.getsockname()[1]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLORA_")} | {
        "SLORA_ADMIN_KEY": ADMIN_KEY, "SLORA_PORT": str(port), "SLORA_HOST": wanted.host, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path), "HF_TOKEN": _HUB_TOKEN,
    }  # fmt: skip
    chosen = {"LOCPATH": str(files / "locales")} if "LOCPATH" in wanted.variables else {}
    for name, value in {**wanted.variables, **chosen}.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    flags = ["--data-dir", str(data_dir / "data"), "--device", "cpu", "--model", str(files / "model")]
    flags += ["--pool-bytes", "8MiB", "--host-cache-bytes", "16MiB", "--kernels", "torch"]
    with own_group() if "GROUP" in wanted.wrappers else nullcontext(()) as enter:
        wrappers = [*enter, *(word for word in wanted.wrappers if word != "GROUP")]
        serve = [*wrappers, "bash", "-c", wanted.shell, "bash", *SLORA, "serve", *flags]
        process = subprocess.Popen(serve, env=variables, cwd=ROOT)
        try:
            use(process, files, variables)
            process.send_signal(signal.SIGTERM)
            assert process.wait(READY_S) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def check_processes(server: psutil.Process) -> None:
    """No child gets the token of the hub or the admin key, and the API has no torch. In most other tests, the processes
    of a server are forked from one that has imported torch."""
    children = server.children(recursive=True)
    assert len(children) >= 2, "the engine and the loader"
    assert not any(
        {_HUB_TOKEN, ADMIN_KEY} & {*child.environ().values(), *child.cmdline()} for child in children
    )
    maps = Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")
    assert "tokenizers" in maps and "libtorch" not in maps


def use(process: "subprocess.Popen[bytes]", files: Path, variables: Mapping[str, str]) -> None:
    def run(*arguments: str) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run([*SLORA, *arguments], env=variables, cwd=ROOT, capture_output=True)

    url = f"http://127.0.0.1:{variables['SLORA_PORT']}"

    def is_ready() -> bool | None:
        assert process.poll() is None, f"the server ended with code {process.returncode}"
        try:
            return httpx.get(f"{url}/readyz", trust_env=False).is_success or None
        except httpx.TransportError:
            return None

    wait_for(is_ready)
    check_processes(psutil.Process(process.pid))
    health = run("health", "--ready")
    assert health.returncode == 0, health.stderr
    with httpx.Client(base_url=url, headers=bearer(ADMIN_KEY), timeout=READY_S, trust_env=False) as admin:
        admin.post("/admin/tenants", json={"name": "acme"}).raise_for_status()
        key = admin.post("/admin/tenants/acme/keys", json={}).raise_for_status().json()["key"]
    with httpx.Client(base_url=url, headers=bearer(key), timeout=READY_S, trust_env=False) as client:
        parts = {
            "config": (files / "adapter" / "adapter_config.json").read_bytes(),
            "weights": (files / "adapter" / "adapter_model.safetensors").read_bytes(),
        }
        client.post("/v1/adapters", data={"name": "up"}, files=parts).raise_for_status()
        messages = [{"role": "user", "content": "hi"}]
        rendered = (
            client.post("/tokenize", json={"model": "default", "messages": messages})
            .raise_for_status()
            .json()
        )
        assert len(rendered["tokens"]) == len("2hi")
        body = {
            "model": "up",
            "messages": messages,
            "max_tokens": 4,
            "response_format": {"type": "json_object"},
        }
        client.post("/v1/chat/completions", json=body).raise_for_status()
    variables = {**variables, "SLORA_API_KEY": key}
    completed = run("complete", "--model", "up", "--max-tokens", "3", "na\u00efve")
    assert completed.returncode == 0, completed.stderr


def test_a_server_works_in_a_hostile_environment(files: Path) -> None:
    wanted = Environment()
    for part in QUICK:
        wanted = wanted | ALONE[part]
    check_environment(files, wanted)


@pytest.mark.soak
@pytest.mark.parametrize("name", [*ALONE, *PAIRS])
def test_a_server_works_in_every_environment_and_in_each_two_of_them(
    name: str, files: Path, tmp_path: Path
) -> None:
    first, *second = PAIRS.get(name, (name,))
    wanted = ALONE[first]
    for part in second:
        wanted = wanted | ALONE[part]
    check_environment(files, wanted)
