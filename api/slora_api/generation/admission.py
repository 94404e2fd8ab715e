"""How much may be in progress at once: for the whole server, for one tenant, and for uploads.

Everything admitted is bounded, so memory and queues are; whoever does not fit is told at once, with the time after
which a place is expected to be free, instead of waiting in a queue that nobody sees. Runs on one event loop and needs
no lock.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slora_api.errors import SOON_S, BadRequest, ServerBusy, Stopping, TenantBusy
from slora_api.generation.places import Places

__all__ = ["Admission"]

# The openai client does not come back at all when it is told to wait longer.
_LONGEST_WAIT_S = 120


class Admission:
    """Counts generations and uploads in progress. After `stop()` nothing new is admitted.

    clock: seconds that only grow; what the time to try again is judged by.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_per_tenant: int,
        max_uploads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_requests = max_requests
        self.max_per_tenant = max_per_tenant
        self.max_uploads = max_uploads
        self.stopping = False
        self._generations = Places(clock)
        self._uploads = Places(clock)
        # Kept for every tenant that was ever here: what its answers took is what the next wait is judged by.
        self._generations_of: defaultdict[str, Places] = defaultdict(lambda: Places(clock))
        self._uploads_of: defaultdict[str, Places] = defaultdict(lambda: Places(clock))

    @property
    def generations(self) -> int:
        """In progress now."""
        return self._generations.num_taken

    def stop(self) -> None:
        """From now on only what is in progress goes on."""
        self.stopping = True

    @contextmanager
    def generation(
        self, tenant: str, num_prompts: int, answers_each: int = 1, param: str = "n"
    ) -> Iterator[None]:
        """Holds a place for each answer. Raises BadRequest, ServerBusy, TenantBusy or Stopping.

        param: the field that asks for several answers to each prompt.
        """
        self.check_generation(tenant, num_prompts, answers_each, param)
        num_answers = num_prompts * answers_each
        with _taken(num_answers, self._generations, self._generations_of[tenant]):
            yield

    def check_generation(
        self, tenant: str, num_prompts: int, answers_each: int = 1, param: str = "n"
    ) -> None:
        """Checks that a place is free for each answer now, and takes none. Raises as `generation` does."""
        num_answers = num_prompts * answers_each
        param = "prompt" if answers_each == 1 else param
        if self.stopping:
            raise Stopping
        limit = min(self.max_requests, self.max_per_tenant)
        if num_answers > limit:
            raise BadRequest(
                f"The request wants {num_answers} answers, each prompt's counted; this server takes at most {limit} "
                "at once. Send fewer prompts, or a smaller `n` and `best_of`.",
                param,
            )
        own = self._generations_of[tenant]
        if (missing := own.num_taken + num_answers - self.max_per_tenant) > 0:
            wait_s = _wait_s(own, missing)
            raise TenantBusy(
                f"You have {own.num_taken} answers in progress and may have {self.max_per_tenant} "
                f"(max_concurrent_per_tenant); try again in {wait_s} s.",
                wait_s,
            )
        if (missing := self.generations + num_answers - self.max_requests) > 0:
            wait_s = _wait_s(self._generations, missing)
            raise ServerBusy(
                f"The server works on {self.generations} answers and takes at most {self.max_requests} "
                f"(max_concurrent_requests); try again in {wait_s} s.",
                wait_s,
            )

    @contextmanager
    def upload(self, tenant: str) -> Iterator[None]:
        """Holds one of the places for uploads, of which a tenant has at most half. Raises ServerBusy, TenantBusy or
        Stopping."""
        if self.stopping:
            raise Stopping
        own, own_limit = self._uploads_of[tenant], max(1, self.max_uploads // 2)
        if own.num_taken >= own_limit:
            wait_s = _wait_s(own, 1)
            raise TenantBusy(f"You may upload {own_limit} adapters at once; try again in {wait_s} s.", wait_s)
        if self._uploads.num_taken >= self.max_uploads:
            wait_s = _wait_s(self._uploads, 1)
            raise ServerBusy(
                f"The server receives {self._uploads.num_taken} adapters and takes at most {self.max_uploads} at "
                f"once (max_concurrent_uploads); try again in {wait_s} s.",
                wait_s,
            )
        with _taken(1, self._uploads, own):
            yield


@contextmanager
def _taken(count: int, *kinds: Places) -> Iterator[None]:
    for places in kinds:
        places.take(count)
    try:
        yield
    finally:
        for places in kinds:
            places.give_back(count)


def _wait_s(places: Places, missing: int) -> int:
    """Whole seconds after which so many places more should be free."""
    wait_s = places.wait_s(missing)
    return SOON_S if wait_s is None else min(_LONGEST_WAIT_S, max(1, math.ceil(wait_s)))
