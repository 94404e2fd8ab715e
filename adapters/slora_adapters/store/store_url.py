"""Opens stores by URL. Only this module chooses the implementation."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from slora_adapters.errors import StoreUnavailable
from slora_adapters.store.file_store import FileStore
from slora_adapters.store.store import Store
from slora_adapters.store.tiered_store import TieredStore

if TYPE_CHECKING:
    from slora_adapters.store.redis_store import RedisStore

# fsspec has two schemes for local files.
FILE_SCHEMES = ("file", "local")
REDIS_SCHEMES = ("redis", "rediss", "unix")
# Schemes that fsspec supports but that cannot be a store, with the reason.
_NO_STORES = {
    "hf": "slora only reads adapters from the Hugging Face hub, with slora adapter push hf://ORG/REPO",
    "http": "web pages cannot be written",
    "https": "web pages cannot be written",
    "memory": "other processes do not see the memory of one process, and it ends with the process",
}


def open_store(url: str, warm_url: str | None = None) -> Store:
    """Opens a durable store, with an optional warm tier in front of it.

    url: a path or file:///path; redis://, rediss:// or unix:// for a Redis with append-only file and noeviction; or a
      URL that fsspec supports, such as s3://bucket/folder.
    warm_url: the URL of a Redis with any settings, whose contents may be lost. If it is the same Redis as in `url`,
      there is no warm tier.

    Raises ValueError for other URLs. Raises StoreUnavailable if the durable store does not answer or its settings allow
    data loss. If the warm tier does not answer, this is logged, and the warm tier is tried again later.
    """
    if warm_url is not None:
        check_redis_url(warm_url, "the warm tier")
    durable = _open_durable(url)
    if warm_url is None or _place(warm_url) == _place(
        url
    ):  # a second copy in the same Redis would not be faster to read
        return durable
    tiers = TieredStore(durable, _open_redis(warm_url, durable=False))
    try:
        tiers.warm.check()
    except StoreUnavailable as error:
        tiers.rest(error)
    return tiers


def check_redis_url(url: str, what: str) -> None:
    """Raises ValueError unless `url` is the URL of a Redis. The message contains no password.

    what: the purpose of this Redis, for the message.
    """
    try:
        _place(url)
    except ValueError:  # the message of this error may quote a part of the password
        raise ValueError(
            f"the URL of {what} is not valid: write / as %2F, @ as %40 and : as %3A in its password"
        ) from None
    if urlsplit(url).scheme not in REDIS_SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in REDIS_SCHEMES)
        raise ValueError(f"{what} must be the URL of a Redis ({schemes}), not {urlsplit(url).scheme!r}")


def _open_durable(url: str) -> Store:
    parts = urlsplit(url)
    if "://" not in url:
        return FileStore(Path(url))
    if parts.scheme in FILE_SCHEMES:
        if parts.netloc not in ("", "localhost"):
            raise ValueError(
                f"a {parts.scheme}:// URL cannot name another host ({parts.netloc!r}); write "
                f"{parts.scheme}:///path"
            )
        return FileStore(Path(unquote(parts.path)))
    if parts.scheme in REDIS_SCHEMES:
        return _open_redis(url, durable=True)
    if why := _NO_STORES.get(parts.scheme):
        raise ValueError(f"a {parts.scheme}:// URL cannot be a store of adapters: {why}")
    module = load_optional("slora_adapters.store.object_store", "objects", f"a {parts.scheme}:// store")
    return cast(Store, module.open_object_store(url))


def _open_redis(url: str, *, durable: bool) -> "RedisStore":
    check_redis_url(url, "the store" if durable else "the warm tier")
    module = load_optional("slora_adapters.store.redis_store", "redis", f"a {urlsplit(url).scheme}:// store")
    return cast("RedisStore", module.open_redis_store(url, durable=durable))


def _place(url: str) -> tuple[str | None, int | None, str]:
    """Returns host, port and path of a URL, without credentials."""
    parts = urlsplit(url)
    return parts.hostname, parts.port, parts.path


def load_optional(module: str, extra: str, what: str) -> Any:
    """Imports a module that needs an optional package. module: its full name.

    Raises ValueError, which names the package to install for `what`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{what} needs the package {error.name}: pip install 'slora[{extra}]'") from error
