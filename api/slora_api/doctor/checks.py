"""The checks of `slora doctor`. Each one yields findings, and may raise SloraError, OSError or ValueError, which become
failures. No check starts an engine, migrates a database or takes a lock.
"""

import errno
import hashlib
import math
import os
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import httpx

from slora.core.byte_text import format_bytes
from slora.core.engine_config import CPU_POOL_SHARE, GPU_POOL_SHARE, QUANTIZED_BITS, SWAP_SHARE
from slora.core.errors import ConfigError, SloraError
from slora.models.gguf_model import find_gguf_file, prepare_gguf_model
from slora.models.hub_model import HubModel, download_gguf, missing_bytes
from slora.models.model_spec import ELEMENT_BYTES
from slora.models.weights.checkpoint import Checkpoint, name_weight_files
from slora.runner.device_facts import DeviceFacts, explain_few_gpus
from slora_adapters.database.database_facts import read_database_facts
from slora_adapters.errors import StoreUnavailable
from slora_adapters.peft.hub_reference import HubReference
from slora_adapters.process.full_disk import RESERVE_BYTES, has_space
from slora_adapters.store.store import Store
from slora_adapters.store.store_url import FILE_SCHEMES, check_redis_url, load_optional, open_store
from slora_api.adapters.base_model import BaseModelFiles
from slora_api.core.data_dir import DataDir, find_lock_holder, store_url
from slora_api.core.package_version import find_package_version
from slora_api.core.server_address import open_listener, own_url
from slora_api.core.settings import GIVE_MODEL, Settings, choose_host_cache_bytes, explain_unknown_variables
from slora_api.http.http_server import explain_few_descriptors
from slora_api.keys.key_record import Pepper, explain_weak_key
from slora_kernels.machine_limits import machine_limits, read_mounts

if TYPE_CHECKING:
    from slora_adapters.store.durable_redis import RedisFacts

T = TypeVar("T")

_TIMEOUT = httpx.Timeout(2.0)
_UNQUANTIZED = ("F64", "F32", "F16", "BF16")
# The end of the names of bitsandbytes' scales. They may be stored in 8 bits, and its codes in any dtype.
_BLOCK_SCALES = ".absmax"
_LOWER = "lower --pool-bytes, --swap-bytes or --host-cache-bytes, or choose a smaller model"
_PROBE = "probe"
_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs"),
    *("fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.ceph", "fuse.rclone"),
)


class Severity(StrEnum):
    """The severity of a finding. FAILS: a server with these settings does not start, or does not work."""

    FAILS = "fails"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    status: Severity
    detail: str
    remedy: str = ""  # empty if `detail` already says what to do


def fine(detail: str) -> Finding:
    return Finding(Severity.OK, detail)


def warning(detail: str, remedy: str = "") -> Finding:
    return Finding(Severity.WARNING, detail, remedy)


def failure(detail: str, remedy: str = "") -> Finding:
    return Finding(Severity.FAILS, detail, remedy)


# -- settings, server and port ----------------------------------------------------------------------------------------


def check_variables() -> Iterator[Finding]:
    for unknown in explain_unknown_variables(os.environ):
        yield warning(unknown, "correct or remove the variable")
    yield fine(f"slora {find_package_version()}, Python {sys.version.split()[0]}")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A slora server that answers on the configured port."""

    version: str
    trouble: str  # why it is not ready; empty if it is ready
    detail: str  # what is wrong although it is ready, such as a full disk; may be empty


def find_server(settings: Settings) -> RunningServer | None:
    """Asks the configured port. Returns None if no slora server answers."""
    url = own_url(settings.host, settings.port)
    if settings.port == 0:
        return None
    try:
        # Ignore the environment's proxy, because a proxy would not connect to this machine.
        with httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=False) as client:
            version, ready = client.get("/version").json()["version"], client.get("/readyz")
            if not isinstance(version, str) or "status" not in client.get("/healthz").json():
                return None
            answer: dict[str, Any] = ready.json()
            trouble = "" if ready.is_success else str(answer["error"]["message"])[:300]
            return RunningServer(version[:40], trouble, str(answer.get("detail", ""))[:300])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def check_server(settings: Settings, server: RunningServer) -> Iterator[Finding]:
    place = f"{settings.host} port {settings.port}"
    if server.trouble:
        yield warning(f"slora {server.version} answers on {place}: {server.trouble}", "look at its log")
    else:
        yield fine(f"slora {server.version} answers on {place} and is ready")
    if server.detail:
        yield warning(server.detail)
    if server.version != (own := find_package_version()):
        yield warning(f"this command is of version {own}", "use the command of the server's installation")


def check_port(settings: Settings) -> Iterator[Finding]:
    place = f"{settings.host} port {settings.port}"
    try:
        open_listener(settings.host, settings.port).close()
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
            raise
        yield failure(f"another program listens on {place}", "end it, or choose another --port")
        return
    yield fine(f"{settings.host}; the server takes a free port" if settings.port == 0 else f"{place} is free")


# -- the machine and the model ----------------------------------------------------------------------------------------


def check_device(device: Future[DeviceFacts], num_ranks: int = 1) -> Iterator[Finding]:
    """num_ranks: the number of tensor-parallel ranks."""
    found = device.result()
    named = (("torch", found.torch), ("triton", found.triton), ("numba", found.numba))
    packages = ", ".join(f"{name} {version}" for name, version in named if version)
    yield fine(f"{found.device}, kernels {found.kernels}; {packages}")
    if (quota := machine_limits().cpu_quota) is not None:
        yield fine(
            f"this control group may use {quota:g} of {len(machine_limits().cores)} cores: torch gets "
            f"{found.num_threads} {'thread' if found.num_threads == 1 else 'threads'}"
        )
    if found.type == "cpu" and not found.has_cpu_kernels:
        yield warning("the fast kernels for this CPU need numba", "pip install numba")
    if found.type == "cpu" and found.num_gpus:
        yield warning("the GPU of this machine is not used", "set --device auto and --kernels auto")
    if found.type == "cuda" and (reason := explain_few_gpus(num_ranks, found.num_gpus)):
        yield failure(reason)
    elif found.num_gpus > num_ranks:
        used = "the first is" if num_ranks == 1 else f"the first {num_ranks} are"
        yield fine(f"{found.num_gpus} GPUs, of which {used} used; CUDA_VISIBLE_DEVICES selects others")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the base model. missing_bytes: the size of the weights that a server downloads first."""

    files: BaseModelFiles
    num_tensors: int  # in the checkpoint
    num_bytes: int  # the approximate memory that its weights take
    missing_bytes: int = 0


def find_model(settings: Settings) -> ModelFacts:
    """Reads the files of the base model that a server reads before it starts its engine. The weights of a model of the
    hub are not downloaded. Raises ConfigError.
    """
    engine = settings.engine
    if (path := find_gguf_file(engine.model)) is not None:
        settings = replace(settings, engine=replace(engine, model=prepare_gguf_model(path)))
    elif not engine.model.is_dir():
        reference = HubReference.of_model(engine.model)
        if reference is None:
            raise ConfigError(f"{engine.model} is not a directory; {GIVE_MODEL}, in --model (SLORA_MODEL)")
        names = [reference.folder or ""]
        if not reference.is_gguf:
            found = HubModel.find(reference, engine.model_impl)
            reference, names = found.reference, name_weight_files(found.directory)
            settings = replace(settings, engine=replace(engine, model=found.directory))
        if missing := missing_bytes(reference, names):
            if reference.is_gguf:
                raise ConfigError(
                    f"{reference} has {format_bytes(missing)} and is not in the cache of this machine; its metadata is "
                    "in the file, so a server has to download it before the doctor can check it"
                )
            return ModelFacts(_open_model(settings), 0, missing, missing)
        if reference.is_gguf:
            directory = prepare_gguf_model(download_gguf(reference, None))
            settings = replace(settings, engine=replace(engine, model=directory))
    files = _open_model(settings)
    checkpoint = Checkpoint(settings.engine.model)
    element_bytes = ELEMENT_BYTES[files.dtype]
    num_tensors = num_bytes = 0
    for name in checkpoint:
        tensor = checkpoint.find(name)
        num_tensors += 1
        has_codes = f"{name}{_BLOCK_SCALES}" in checkpoint
        if name.endswith(_BLOCK_SCALES):
            num_bytes += math.prod(tensor.shape) * ELEMENT_BYTES["float32"]
        elif has_codes or (tensor.block is None and tensor.dtype not in _UNQUANTIZED):
            num_bytes += tensor.num_bytes
        elif settings.engine.quantization != "auto" and name.endswith("proj.weight"):
            num_bytes += int(math.prod(tensor.shape) * QUANTIZED_BITS[settings.engine.quantization] / 8)
        else:
            num_bytes += math.prod(tensor.shape) * element_bytes
    return ModelFacts(files, num_tensors, num_bytes)


def _open_model(settings: Settings) -> BaseModelFiles:
    """Opens the base model as a server does, with its tokenizer. Raises ConfigError."""
    files = BaseModelFiles(settings)
    _ = files.tokenizer
    return files


def check_model(model: Future[ModelFacts]) -> Iterator[Finding]:
    found = model.result()
    spec = found.files.config
    decoder = "slora's decoder" if spec.decoder else "transformers' classes"
    size = f"{found.num_tensors} tensors, {format_bytes(found.num_bytes)}"
    if found.missing_bytes:
        size = f"the first start downloads {format_bytes(found.missing_bytes)}"
    yield fine(f"{found.files.name}: {spec.family}, computed by {decoder} in {found.files.dtype}; {size}")


def explain_no_model() -> Iterator[Finding]:
    yield failure("--model (SLORA_MODEL) is missing", GIVE_MODEL)


def check_memory(
    settings: Settings, device: Future[DeviceFacts], model: Future[ModelFacts]
) -> Iterator[Finding]:
    """Compares free memory with weights, page pool, swap space and host cache. If the model or the device has a check
    that fails, this check does without it.
    """
    limits = machine_limits()
    limit, free = limits.memory_bytes, limits.free_memory_bytes()
    within = f" (this control group may use {format_bytes(limit)})" if limit is not None else ""
    found_device, found_model = _result_if_known(device), _result_if_known(model)
    weights = found_model.num_bytes if found_model else 0
    # Each tensor-parallel rank has a page pool and swap space of its own.
    num_ranks, pool = settings.engine.tensor_parallel_size, settings.engine.pool_bytes
    gpu_free = found_device.free_bytes if found_device and found_device.type == "cuda" else None
    if gpu_free is not None:
        of_rank = weights // num_ranks
        yield _compare_gpu_memory(gpu_free, of_rank, pool)
        likely_pool = num_ranks * (pool or int(max(0, gpu_free - of_rank) * GPU_POOL_SHARE))
        needs = {}
    else:
        likely_pool = num_ranks * pool if pool else int(max(0, free - weights) * CPU_POOL_SHARE)
        needs = {"weights": weights, "page pool": likely_pool} if found_model else {"page pool": likely_pool}
    swap = settings.engine.swap_bytes
    if swap is None:
        swap = int(min(likely_pool, max(0, free - sum(needs.values()))) * SWAP_SHARE)
    else:
        swap *= num_ranks
    needs |= {"swapped sequences": swap, "host cache": choose_host_cache_bytes(settings)}
    needed = sum(needs.values())
    named = ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.items())
    text = (
        f"{format_bytes(free)} of host memory are free{within}; {format_bytes(needed)} are needed ({named})"
    )
    if needed > free:
        yield failure(text, _LOWER)
    elif needed > 0.9 * free:
        yield warning(text, f"the processes need further memory: {_LOWER}")
    else:
        yield fine(text)


def _compare_gpu_memory(free: int, weights: int, pool: int | None) -> Finding:
    if weights + (pool or 0) <= free:
        return fine(f"{format_bytes(free)} of GPU memory are free; weights take {format_bytes(weights)}")
    wanted = f"weights {format_bytes(weights)}" + (f", page pool {format_bytes(pool)}" if pool else "")
    return failure(
        f"{format_bytes(free)} of GPU memory are free, but more is needed ({wanted})",
        "end other programs on the GPU, lower --pool-bytes, set --quantization or choose a smaller model",
    )


def _result_if_known(fact: Future[T]) -> T | None:
    """Returns the fact; None if it cannot be found. Another check then shows the error."""
    try:
        return fact.result()
    except (SloraError, OSError, ValueError):
        return None


def check_open_files(settings: Settings) -> Iterator[Finding]:
    # A server raises the soft limit to the hard limit.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    connections = -(-settings.max_connections // settings.api_workers)
    if shortage := explain_few_descriptors(connections, limit):
        yield warning(shortage)
    else:
        yield fine(f"each process may open {limit} files; {connections} connections are allowed")
    if explain_few_descriptors(-(-settings.max_concurrent_requests // settings.api_workers), limit):
        yield failure(
            f"{settings.max_concurrent_requests} answers at once, each on a connection, need more files"
        )


# -- the data directory -----------------------------------------------------------------------------------------------


def check_data_directory(settings: Settings, *, is_in_use: bool) -> Iterator[Finding]:
    """is_in_use: whether the server whose settings these are runs."""
    path = Path(settings.data_dir).resolve()
    yield from _check_directory(path, "--data-dir")
    if not path.is_dir():
        return
    if path.stat().st_uid != os.geteuid() and os.geteuid() != 0:
        yield failure(
            f"it belongs to user {path.stat().st_uid}, and this is user {os.geteuid()}",
            "run slora as its owner, or chown it",
        )
    holder = find_lock_holder(path)
    if holder is not None and not is_in_use:
        yield failure(
            f"another slora server uses it ({holder})",
            "stop that server, or choose another --data-dir; if it is yours, give its --port",
        )
    kind = find_file_system(path)
    if kind in _NETWORK and not settings.database:
        yield warning(
            f"SQLite is not safe on the network file system {kind}",
            "use a local disk, or PostgreSQL (--database)",
        )
    if kind in ("tmpfs", "ramfs", "overlay"):
        yield warning(
            f"it is on {kind}, so tenants, keys and adapters are lost with the machine or the container",
            "choose a --data-dir on a disk, or mount a volume there",
        )
    uploads, free = settings.max_concurrent_uploads * settings.max_upload_bytes, shutil.disk_usage(path).free
    if not has_space(path, RESERVE_BYTES):
        yield failure(
            f"its disk is full ({format_bytes(free)} free): the server would be read-only", "free some space"
        )
    elif free < uploads + RESERVE_BYTES:
        yield warning(
            f"{format_bytes(free)} are free, but {settings.max_concurrent_uploads} uploads of "
            f"{format_bytes(settings.max_upload_bytes)} may be in progress",
            "free some space, or lower --max-upload-bytes",
        )
    else:
        yield fine(f"{format_bytes(free)} are free on {kind or 'an unknown file system'}")


def _check_directory(path: Path, flag: str) -> Iterator[Finding]:
    """Checks that the server can create and write the directory, and that its disk syncs. Leaves nothing in it."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        yield failure(f"{existing} is not a directory", f"choose another {flag}")
        return
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        yield failure(
            f"user {os.geteuid()} may not write in {existing}", f"chown or chmod it, or choose another {flag}"
        )
        return
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(_PROBE.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield failure(f"{existing} cannot be written and synced ({error.strerror})", f"choose another {flag}")
        return
    yield fine(
        f"{path} can be written and synced"
        if existing == path
        else f"{path} does not exist yet, and can be created"
    )


def find_file_system(path: Path, root: Path = Path("/")) -> str:
    """Returns the type of a path's file system as in mount(8), such as `ext4`; empty if it is not known.

    path: absolute, without symbolic links. root: as in `read_mounts`.
    """
    best, kind = -1, ""
    for mount in read_mounts(root):
        # Of several mounts at the same path, the last one hides the others.
        if path.is_relative_to(mount.point) and len(mount.point.parts) >= best:
            best, kind = len(mount.point.parts), mount.kind
    return kind


def check_secrets(settings: Settings, flags: Mapping[str, str | None]) -> Iterator[Finding]:
    """Checks that only the server's owner can read its secrets. flags: the flags of the command line, which other users
    of the machine can see.
    """
    data = DataDir(Path(settings.data_dir).resolve())
    if data.path.is_dir() and _is_open(data.path):
        yield warning(
            f"other users may read {data.path} until the server starts and closes it",
            f"chmod 700 {data.path}",
        )
    secrets = (data.pepper, data.admin_key, data.unseen_admin_key, data.demo_keys)
    files = [path for path in secrets if path.exists()]
    for path in files:
        if not os.access(path, os.R_OK):
            yield failure(f"user {os.geteuid()} may not read {path}", "run slora as its owner, or chown it")
        elif _is_open(path):
            yield warning(f"other users may read {path}", f"chmod 600 {path}")
    if data.pepper in files and os.access(data.pepper, os.R_OK):
        Pepper.from_file(data.pepper)
    elif data.database.exists() and not settings.database and data.pepper not in files:
        yield failure(
            f"{data.pepper} is missing beside the database, so no API key can be checked",
            "restore the file from a backup",
        )
    if settings.admin_key and (weakness := explain_weak_key(settings.admin_key)):
        yield warning(weakness)
    for name in ("admin_key", "database", "redis", "quota_redis", "store"):
        if (given := flags.get(name)) and (name == "admin_key" or _has_password(given)):
            flag = "--" + name.replace("_", "-")
            yield warning(f"other users of the machine can see {flag}", f"set SLORA_{name.upper()} instead")
    yield fine(f"{len(files)} files with secrets" if files else "none yet; the first start creates them")


def _is_open(path: Path) -> bool:
    """Returns whether any user other than the owner has a permission on the file."""
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def _has_password(url: str) -> bool:
    return "://" in url and bool(urlsplit(url).password)


# -- database, store and Redis ----------------------------------------------------------------------------------------


def check_database(settings: Settings) -> Iterator[Finding]:
    data = DataDir(Path(settings.data_dir).resolve())
    facts = read_database_facts(settings.database or data.database)
    if facts.revisions is None:
        yield fine(f"{facts.label} does not exist yet; the first start creates it")
        return
    found, head = facts.revisions
    if found is None:
        yield fine(f"{facts.server} {facts.label} has no tables of this release yet; the server creates them")
    elif found == head:
        yield fine(f"{facts.server} {facts.label} has the schema of this release ({head})")
    else:
        yield warning(
            f"{facts.server} {facts.label} has schema {found}; the server migrates it to {head} when it starts",
            "make a backup first, because older releases refuse the migrated schema",
        )


def check_store(settings: Settings) -> Iterator[Finding]:
    """Opens the store as a server does, and writes, reads and deletes a blob. If the store is a directory that does not
    exist yet, the directory is not created.
    """
    url = store_url(settings, DataDir(Path(settings.data_dir).resolve()))
    parts = urlsplit(url)
    if "://" not in url or parts.scheme in FILE_SCHEMES:
        directory = Path(unquote(parts.path) if "://" in url else url).resolve()
        yield from _check_directory(directory, "--store")
        if not (directory / "blobs").is_dir():
            return
    else:
        yield fine(f"a {parts.scheme}:// store")
    with closing(open_store(url)) as store:
        _try_blob(store)
    yield fine("a blob was written, read and deleted")


def _try_blob(store: Store) -> None:
    """Writes, reads and deletes a blob. Its content is random, so the blob belongs to no adapter and no other check.
    Raises StoreUnavailable.
    """
    content = os.urandom(64)
    digest = hashlib.sha256(content).hexdigest()
    try:
        store.put(digest, {_PROBE: content})
        with closing(store.open(digest)) as blob:
            read = bytearray(len(content))
            blob.read_into(_PROBE, 0, memoryview(read))
    finally:
        store.delete(digest)
    if bytes(read) != content:
        raise StoreUnavailable("the store returned different bytes from those written: check its disk")


def check_redis(settings: Settings) -> Iterator[Finding]:
    """Checks the warm tier and the Redis of quotas. If the store is a Redis, `check_store` checks it."""
    if settings.redis:
        facts = _read_redis(settings.redis, "the warm tier")
        yield fine(_describe_redis("warm tier", facts))
        if facts.eviction == "noeviction" and facts.max_bytes and facts.used_bytes > 0.9 * facts.max_bytes:
            yield warning(
                "the warm tier is nearly full; when it is full, it refuses new copies of adapters",
                "raise maxmemory, or set maxmemory-policy allkeys-lru if nothing else is in this Redis",
            )
    if settings.quota_redis:
        facts = _read_redis(settings.quota_redis, "--quota-redis")
        yield fine(_describe_redis("quotas", facts))
        if facts.eviction != "noeviction":
            yield warning("this Redis may forget counters of quotas", "set maxmemory-policy noeviction")
    if not settings.redis and not settings.quota_redis:
        yield fine("not used as a warm tier or for quotas")


def _describe_redis(use: str, facts: "RedisFacts") -> str:
    limit = format_bytes(facts.max_bytes) if facts.max_bytes else "no limit"
    return (
        f"{use}: Redis {facts.version}, {format_bytes(facts.used_bytes)} used of {limit}, maxmemory-policy "
        f"{facts.eviction}, appendonly {'yes' if facts.is_logged else 'no'}"
    )


def _read_redis(url: str, what: str) -> "RedisFacts":
    check_redis_url(url, what)
    module = load_optional("slora_adapters.store.durable_redis", "redis", what)
    try:
        facts: RedisFacts = module.read_redis_facts(url)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{what}: {error}; check its URL, and that it runs") from error
    return facts
