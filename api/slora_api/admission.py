"""How much may be in progress at once: for the whole server, for one tenant, and for uploads.

Everything admitted is bounded, so memory and queues are; whoever does not fit is told at once, with a time to try
again, instead of waiting in a queue that nobody sees. Runs on one event loop and needs no lock.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from slora_api.errors import BadRequest, ServerBusy, Stopping, TenantBusy

__all__ = ["Admission"]


class Admission:
    """Counts generations and uploads in progress. After `stop()` nothing new is admitted."""

    def __init__(self, *, max_requests: int, max_per_tenant: int, max_uploads: int) -> None:
        self.max_requests = max_requests
        self.max_per_tenant = max_per_tenant
        self.max_uploads = max_uploads
        self.stopping = False
        self.generations = 0
        self.uploads = 0
        self._uploads_by_tenant: Counter[str] = Counter()
        self._by_tenant: Counter[str] = Counter()

    def stop(self) -> None:
        """From now on only what is in progress goes on."""
        self.stopping = True

    @contextmanager
    def generation(self, tenant: str, num_prompts: int, answers_each: int = 1) -> Iterator[None]:
        """Holds a place for each answer. Raises BadRequest, ServerBusy, TenantBusy or Stopping."""
        num_answers = num_prompts * answers_each
        self._check_generation(tenant, num_answers, "prompt" if answers_each == 1 else "n")
        self.generations += num_answers
        self._by_tenant[tenant] += num_answers
        try:
            yield
        finally:
            self.generations -= num_answers
            self._by_tenant[tenant] -= num_answers
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

    def _check_generation(self, tenant: str, num_answers: int, param: str) -> None:
        if self.stopping:
            raise Stopping
        limit = min(self.max_requests, self.max_per_tenant)
        if num_answers > limit:
            raise BadRequest(
                f"The request wants {num_answers} answers, each prompt's counted; this server takes at most {limit} "
                "at once. Send fewer prompts, or a smaller `n` and `best_of`.",
                param,
            )
        if self._by_tenant[tenant] + num_answers > self.max_per_tenant:
            raise TenantBusy(
                f"You have {self._by_tenant[tenant]} answers in progress and may have {self.max_per_tenant} "
                "(max_concurrent_per_tenant); wait for some of them."
            )
        if self.generations + num_answers > self.max_requests:
            raise ServerBusy(
                f"The server works on {self.generations} answers and takes at most {self.max_requests} "
                "(max_concurrent_requests); try again shortly."
            )

    @contextmanager
    def upload(self, tenant: str) -> Iterator[None]:
        """Holds one of the places for uploads, of which a tenant has at most half. Raises ServerBusy, TenantBusy or
        Stopping."""
        if self.stopping:
            raise Stopping
        own_limit = max(1, self.max_uploads // 2)
        if self._uploads_by_tenant[tenant] >= own_limit:
            raise TenantBusy(f"You may upload {own_limit} adapters at once; wait for one of them.")
        if self.uploads >= self.max_uploads:
            raise ServerBusy(
                f"The server receives {self.uploads} adapters and takes at most {self.max_uploads} at once "
                "(max_concurrent_uploads); try again shortly."
            )
        self.uploads += 1
        self._uploads_by_tenant[tenant] += 1
        try:
            yield
        finally:
            self.uploads -= 1
            self._uploads_by_tenant -= Counter([tenant])
