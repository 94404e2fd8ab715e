"""Opens stores by URL; the only place that decides which implementations are loaded."""

import importlib
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from slora_adapters.file_store import FileStore
from slora_adapters.store import Store
from slora_adapters.tiered_store import TieredStore

_REDIS_SCHEMES = ("redis", "rediss", "unix")


def open_store(url: str, warm_url: str | None = None) -> Store:
    """Opens a durable store, with an optional warm tier in front of it.

    `url`: a path or file:///path, or redis://, rediss://, unix:// (a Redis with append-only file and noeviction).
    `warm_url`: a Redis of any settings, whose contents may vanish. Raises ValueError for other URLs, StoreUnavailable
    if the durable store does not answer or could lose data; a warm tier that is down is left out until it answers.
    """
    durable = _open_durable(url)
    if warm_url is None:
        return durable
    if urlsplit(warm_url).scheme not in _REDIS_SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in _REDIS_SCHEMES)
        raise ValueError(f"the warm tier must be a Redis ({schemes}), not {urlsplit(warm_url).scheme!r}")
    return TieredStore(durable, _open_redis(warm_url, durable=False))


def _open_durable(url: str) -> Store:
    parts = urlsplit(url)
    if parts.scheme in _REDIS_SCHEMES:
        return _open_redis(url, durable=True)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FileStore(Path(unquote(parts.path)))
    if "://" in url:
        raise ValueError(f"stores are a path, file:///path or redis://host; {parts.scheme!r} is not known")
    return FileStore(Path(url))


def _open_redis(url: str, *, durable: bool) -> Store:
    try:
        module = importlib.import_module("slora_adapters.redis_store")
    except ModuleNotFoundError as error:
        raise ValueError("a redis:// store needs the package redis: pip install 'slora[redis]'") from error
    return cast(Store, module.open_redis_store(url, durable=durable))
