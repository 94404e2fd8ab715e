"""Runs all probes against one server."""

import random
from collections.abc import Callable, Generator

from slora_api.cli.isolation.audited_server import AuditedServer, audited_tenants
from slora_api.cli.isolation.enumeration import compare_lookups, compare_uploads
from slora_api.cli.isolation.finding import Finding
from slora_api.cli.isolation.key_echo import send_keys_in_odd_places
from slora_api.cli.isolation.prefix_cells import compare_prefixes
from slora_api.cli.isolation.random_adapter import make_adapter
from slora_api.cli.isolation.route_walk import walk_routes, walk_suspended
from slora_api.cli.isolation.timing import compare_times
from slora_api.cli.remote import check

__all__ = ["audit_isolation"]


def audit_isolation(
    server: AuditedServer, num_timings: int, show_progress: Callable[[int], None]
) -> Generator[Finding, None, None]:
    """Runs all probes and yields their findings. Two temporary tenants exist until the iterator is exhausted or closed.

    num_timings: samples in each arm of the timing test; 0 leaves the test out.
    """
    with audited_tenants(server) as (owner, other):
        modules = check(server.send("GET", "/v1/adapter-modules", owner.key))["data"]
        base = next(
            model["id"]
            for model in check(server.send("GET", "/v1/models", owner.key))["data"]
            if not model["parent"]
        )
        # Each run uses fresh weights, because the store may still have the blobs of an earlier run.
        seed = random.randrange(1 << 30)
        shared, second, fresh = (make_adapter(modules, seed + at) for at in range(3))
        owner.upload("audit-owned", shared)
        owner.upload("audit-second", second)
        yield from walk_routes(server, owner)
        yield from compare_lookups(other, "audit-owned")
        yield from compare_uploads(other, shared, fresh)
        yield from send_keys_in_odd_places(owner)
        # `compare_uploads` has already uploaded `shared` for the other tenant, as audit-known.
        other.upload("audit-second", second)
        yield from compare_prefixes(owner, other, ("audit-owned", "audit-known"), "audit-second", base)
        if num_timings:
            yield from compare_times(owner, other, base, num_timings, show_progress)
        yield walk_suspended(server, other)
