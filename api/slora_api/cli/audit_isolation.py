"""`slora audit isolation`: checks that the tenants of a running server are isolated."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from types import FrameType

from slora_api.cli.isolation.audit import audit_isolation
from slora_api.cli.isolation.audited_server import AuditedServer
from slora_api.cli.output import print_json, print_records
from slora_api.cli.remote import CommandFailed, admin_key, explained, open_client

__all__ = ["audit"]

_COLUMNS = {
    "PROBE": lambda finding: finding["probe"],
    "CELL": lambda finding: finding["cell"],
    "EXPECTED": lambda finding: finding["expected"],
    "SEEN": lambda finding: finding["seen"],
    "OK": lambda finding: "yes" if finding["ok"] else "NO",
}
# The timing test prints its progress whenever this many rounds are done.
_PROGRESS = 50


@explained
def audit(arguments: argparse.Namespace) -> None:
    """Runs the audit and prints the findings. Raises CommandFailed if a check fails."""

    def show_progress(done: int) -> None:
        if done % _PROGRESS == 0:
            print(f"timing: {done} of {num_timings} rounds", file=sys.stderr)

    num_timings = arguments.samples if arguments.timing else 0
    key = admin_key()
    with (
        _terminable(),
        open_client({}) as client,
        closing(audit_isolation(AuditedServer(client, key), num_timings, show_progress)) as probed,
    ):
        findings = [asdict(finding) for finding in probed]
    num_wrong = sum(not finding["ok"] for finding in findings)
    if arguments.json:
        print_json({"ok": num_wrong == 0, "findings": findings})
    else:
        print_records(findings, _COLUMNS, as_json=False)
    if num_wrong:
        raise CommandFailed(f"{num_wrong} of {len(findings)} checks failed")


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
