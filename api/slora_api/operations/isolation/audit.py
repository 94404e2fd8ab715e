"""`slora audit isolation`: checks that the tenants of a running server are isolated."""

import argparse
import random
import signal
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from types import FrameType

from slora_api.cli.declaration import command
from slora_api.cli.output import print_json, print_records
from slora_api.cli.remote import CommandFailed, admin_key, check, explained, open_client
from slora_api.operations.isolation.audited_server import AuditedServer, audited_tenants, make_adapter
from slora_api.operations.isolation.probes import (
    ProbeResult,
    compare_lookups,
    compare_prefixes,
    walk_routes,
    walk_suspended,
)

_COLUMNS = {
    "PROBE": lambda finding: finding["probe"],
    "CELL": lambda finding: finding["cell"],
    "EXPECTED": lambda finding: finding["expected"],
    "SEEN": lambda finding: finding["seen"],
    "OK": lambda finding: "yes" if finding["ok"] else "NO",
}


@command(
    "audit isolation",
    "create two temporary tenants on the running server, and check that neither can see or use what the other has",
    epilog="The exit code is 0 only if every check passes.",
    has_json=True,
)
@explained
def audit(arguments: argparse.Namespace) -> None:
    """Runs the audit and prints the findings. Raises CommandFailed if a check fails."""
    key = admin_key()
    with (
        _terminable(),
        open_client({}) as client,
        closing(_probe(AuditedServer(client, key))) as probed,
    ):
        findings = [asdict(finding) for finding in probed]
    num_wrong = sum(not finding["ok"] for finding in findings)
    if arguments.json:
        print_json({"ok": num_wrong == 0, "findings": findings})
    else:
        print_records(findings, _COLUMNS, as_json=False)
    if num_wrong:
        raise CommandFailed(f"{num_wrong} of {len(findings)} checks failed")


def _probe(server: AuditedServer) -> Generator[ProbeResult, None, None]:
    """Runs all probes and yields their findings. Two temporary tenants exist until the iterator is exhausted or
    closed.
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
        shared, second = make_adapter(modules, seed), make_adapter(modules, seed + 1)
        owner.upload("audit-owned", shared)
        owner.upload("audit-second", second)
        yield from walk_routes(server, owner)
        yield from compare_lookups(other, "audit-owned")
        other.upload("audit-known", shared)
        other.upload("audit-second", second)
        yield from compare_prefixes(owner, other, ("audit-owned", "audit-known"), "audit-second", base)
        yield walk_suspended(server, other)


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM end the command in the same way as Ctrl-C, so that the temporary tenants are removed."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
