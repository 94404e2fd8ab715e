"""Tracks the tenants' requests in progress in this process. A request is ended when its key is revoked or its tenant is
suspended.

Each key is checked five times a second in the cache of the key store. If a key has left the cache, for example because
the key or its tenant has changed, the check reads it from the database. The feed of changes is also read five times a
second, so a change by any process ends the requests within a second. While the database does not answer, requests
continue, except requests with a key in the revocation journal.

If a key expires while a request with this key is in progress, the request continues to its end. Feeds without an
end are ended instead.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slora_adapters.errors import StoreUnavailable
from slora_api.core.errors import ApiError, KeyRevoked
from slora_api.core.request_context import ENDED_BY
from slora_api.core.threads import control_thread
from slora_api.keys.key_store import KeyStore

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    task: asyncio.Task[Any]
    state: dict[str, Any]
    ends_with_key: bool


class RunningRequests:
    """The tracked requests by key id. Runs on one event loop. Requests are ended only while `run` is running."""

    def __init__(self, key_store: KeyStore) -> None:
        self._key_store = key_store
        self._by_key: dict[str, set[_Request]] = {}
        self._look_up: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """The number of keys with requests in progress."""
        return len(self._by_key)

    @contextmanager
    def track(self, key_id: str, state: dict[str, Any], *, ends_with_key: bool = False) -> Iterator[None]:
        """Tracks the request that the current task answers. state: the state of the request. ends_with_key: whether the
        request also ends when its key expires.

        To end a request, its task is cancelled. Instead of CancelledError, this context then raises the error that has
        ended the request.
        """
        task = asyncio.current_task()
        assert task is not None
        request = _Request(task, state, ends_with_key)
        self._by_key.setdefault(key_id, set()).add(request)
        try:
            yield
        except asyncio.CancelledError:
            if ENDED_BY not in state:
                raise
            raise state[ENDED_BY] from None
        finally:
            if ENDED_BY in state:
                task.uncancel()
            self._by_key[key_id].discard(request)
            if not self._by_key[key_id]:
                del self._by_key[key_id]

    async def run(self) -> None:
        """Checks the keys until cancelled."""
        try:
            while True:
                self._check()
                await asyncio.sleep(_POLL_S)
        finally:
            if self._look_up is not None:
                self._look_up.cancel()

    def _check(self) -> None:
        """Checks each key once. A separate task looks up the keys that are not cached, so that a slow database delays
        no other revocation.
        """
        missing = []
        for key_id in list(self._by_key):
            if self._key_store.is_key_local(key_id):
                self._end_requests(key_id, *self._find_refusal(key_id))
            else:
                missing.append(key_id)
        if missing and (self._look_up is None or self._look_up.done()):
            self._look_up = asyncio.create_task(self._check_missing(missing))

    async def _check_missing(self, key_ids: Sequence[str]) -> None:
        for key_id in key_ids:
            try:
                refusal, has_expired = await control_thread(self._find_refusal, key_id)
            except StoreUnavailable:
                return
            self._end_requests(key_id, refusal, has_expired)

    def _find_refusal(self, key_id: str) -> tuple[ApiError | None, bool]:
        """Returns the error that ends the requests of the key, and whether it has only expired."""
        if (refusal := self._key_store.find_refusal(key_id)) is not None:
            return refusal, False
        return (KeyRevoked("has expired"), True) if self._key_store.has_expired(key_id) else (None, False)

    def _end_requests(self, key_id: str, refusal: ApiError | None, has_expired: bool) -> None:
        if refusal is None:
            return
        for request in self._by_key.get(key_id, ()):
            if ENDED_BY not in request.state and (request.ends_with_key or not has_expired):
                request.state[ENDED_BY] = refusal
                request.task.cancel()
