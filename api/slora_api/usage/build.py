"""Builds the objects that record usage."""

from dataclasses import dataclass

from slora.core.usage_journal import UsageJournal
from slora_api.core.foundation import Foundation
from slora_api.usage.usage_ledger import UsageLedger
from slora_api.usage.usage_recorder import Observer, UsageRecorder
from slora_api.usage.usage_shipper import UsageShipper


@dataclass(frozen=True, slots=True)
class RecordedUsage:
    ledger: UsageLedger
    shipper: UsageShipper
    recorder: UsageRecorder


def build_usage(foundation: Foundation, observe: Observer) -> RecordedUsage:
    """observe: see `UsageRecorder`."""
    journal = UsageJournal(foundation.data.usage)
    foundation.stack.callback(journal.close)
    ledger = UsageLedger(foundation.database)
    kept_days = foundation.settings.usage_days if foundation.is_main else None
    shipper = UsageShipper(journal, foundation.data.usage, ledger, kept_days)
    foundation.stack.callback(shipper.ship)
    recorder = UsageRecorder(foundation.client, journal, observe=observe)
    foundation.stack.callback(recorder.close)
    return RecordedUsage(ledger, shipper, recorder)
