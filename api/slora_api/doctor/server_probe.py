"""Finds out what answers on the configured port: nothing, a slora server, or another program."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from slora.errors import ConfigError
from slora_api.doctor.finding import Finding, failure, fine, warning
from slora_api.doctor.shared_fact import SharedFact
from slora_api.http.listener import open_listener
from slora_api.settings import Settings

__all__ = ["ServerProbe", "check_port", "find_server"]

_TIMEOUT = httpx.Timeout(2.0)
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class ServerProbe:
    """The result of a probe of the port.

    refusal: why a server could not listen on the port; empty if a server could listen.
    is_taken: whether a program already listens on the port.
    version: the version of the slora server that answers; None if no slora server answers.
    trouble: why the answering server is not ready; empty if the server is ready.
    """

    refusal: str = ""
    is_taken: bool = False
    version: str | None = None
    trouble: str = ""

    @property
    def is_slora(self) -> bool:
        return self.version is not None


def find_server(settings: Settings) -> ServerProbe:
    try:
        open_listener(settings.host, settings.port).close()
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
            return ServerProbe(str(error))
        return _ask(settings, str(error))
    return ServerProbe()


def _ask(settings: Settings, refusal: str) -> ServerProbe:
    host = _LOOPBACK.get(settings.host, settings.host)
    url = f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
    try:
        # Ignore the environment's proxy, because a proxy would not connect to this machine.
        with httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=False) as client:
            version = client.get("/version").json()["version"]
            ready = client.get("/readyz")
            if not isinstance(version, str) or "status" not in client.get("/healthz").json():
                return ServerProbe(refusal, is_taken=True)
            return ServerProbe(refusal, True, version[:40], "" if ready.is_success else _reason(ready))
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ServerProbe(refusal, is_taken=True)


def _reason(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])[:300]


def check_port(settings: Settings, server: SharedFact[ServerProbe]) -> Iterator[Finding]:
    found = server.get()
    place = f"{settings.host} port {settings.port}"
    if found.is_slora and found.trouble:
        yield warning(f"slora {found.version} answers on {place}: {found.trouble}", "look at its log")
    elif found.is_slora:
        yield fine(f"slora {found.version} answers on {place} and is ready")
    elif found.is_taken:
        yield failure(f"another program listens on {place}", "end it, or choose another --port")
    elif found.refusal:
        yield failure(found.refusal)
    elif settings.port == 0:
        yield fine(f"{settings.host}; the server takes a free port")
    else:
        yield fine(f"{place} is free")
