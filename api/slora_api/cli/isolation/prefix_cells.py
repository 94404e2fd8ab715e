"""Checks for pairs of tenants and adapters whether a request reuses the computed prefix of an earlier request.

With the same tenant and adapter, the prefix must be reused. Otherwise, the other cells would prove nothing.
"""

import random
import string
from collections.abc import Iterator
from typing import NamedTuple

from slora_api.cli.isolation.audited_server import AuditedServer, AuditedTenant
from slora_api.cli.isolation.finding import Finding
from slora_api.cli.remote import CommandFailed, check

__all__ = ["Prompts", "compare_prefixes"]

_PROBE = "prefix cache"
# Attempts per cell. On a busy server, the prefix may be evicted between the two requests, which hides a hit.
_TRIES = 3
_MAX_PROMPT_CHARS = 1024


class Prompts:
    """Random prompts of one length, which no tenant has sent before."""

    def __init__(self, server: AuditedServer, key: str) -> None:
        limits = check(server.send("GET", "/v1/limits", key))
        # A token has at least one character, so a prompt fills at most half of the context.
        self._num_chars = min(limits["max_model_len"] // 2, _MAX_PROMPT_CHARS)
        self._random = random.Random()

    def draw(self) -> str:
        return "".join(self._random.choices(string.ascii_lowercase + " ", k=self._num_chars - 1)) + "."


class _Sender(NamedTuple):
    tenant: AuditedTenant
    model: str


def compare_prefixes(
    owner: AuditedTenant, other: AuditedTenant, shared: tuple[str, str], own: str, base: str
) -> Iterator[Finding]:
    """Yields one finding for each pair of tenants and adapters.

    shared: the names that the owner and the other tenant gave to the same adapter. own: the name that both tenants gave
        to a second adapter. base: the name of the base model.
    """
    prompts = Prompts(owner.server, owner.key)
    adapted = _Sender(owner, shared[0])
    plain = _Sender(owner, base)
    cells = (
        ("same tenant, same adapter", adapted, adapted, True),
        ("same tenant, other adapter", adapted, _Sender(owner, own), False),
        ("other tenant, same adapter", adapted, _Sender(other, shared[1]), False),
        ("other tenant, other adapter", adapted, _Sender(other, own), False),
        ("same tenant, base model", plain, plain, True),
        ("other tenant, base model", plain, _Sender(other, base), False),
        ("same tenant, base model after an adapter", adapted, plain, False),
        ("same tenant, adapter after the base model", plain, adapted, False),
    )
    for cell, first, second, is_hit in cells:
        cached = _count_reused(prompts, first, second)
        yield Finding(
            _PROBE,
            cell,
            "> 0 tokens reused" if is_hit else "0 tokens reused",
            str(cached),
            (cached > 0) == is_hit,
        )


def _count_reused(prompts: Prompts, first: _Sender, second: _Sender) -> int:
    """Returns how many prompt tokens the second request found in the cache. Tries several fresh prompts until the
    second request finds a token.
    """
    cached = 0
    for _ in range(_TRIES):
        prompt = prompts.draw()
        _cached_tokens(first, prompt)
        cached = _cached_tokens(second, prompt)
        if cached:
            break
    return cached


def _cached_tokens(sender: _Sender, prompt: str) -> int:
    answer = check(sender.tenant.server.complete(sender.tenant.key, sender.model, prompt))
    try:
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    except KeyError:
        raise CommandFailed(
            "the server's answers have no usage.prompt_tokens_details.cached_tokens"
        ) from None
    return cached
