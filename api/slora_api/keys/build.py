"""Builds the objects of API keys."""

from dataclasses import dataclass

from slora_api.core.foundation import Foundation
from slora_api.keys.api_key import Pepper
from slora_api.keys.key_store import KeyStore
from slora_api.keys.key_use import KeyUse
from slora_api.keys.revocation_journal import RevocationJournal
from slora_api.keys.running_requests import RunningRequests


@dataclass(frozen=True, slots=True)
class Keys:
    pepper: Pepper
    store: KeyStore
    use: KeyUse
    running: RunningRequests


def build_keys(foundation: Foundation) -> Keys:
    pepper = Pepper.from_file(foundation.data.pepper)
    journal = RevocationJournal(foundation.data.revocations)
    foundation.stack.callback(journal.close)
    store = KeyStore(
        foundation.database,
        pepper,
        journal,
        foundation.settings.auth_stale_seconds,
        is_behind=foundation.changes.is_behind,
    )
    return Keys(pepper, store, KeyUse(foundation.database), RunningRequests(store))
