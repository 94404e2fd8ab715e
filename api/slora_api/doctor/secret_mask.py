"""Removes secrets from what `slora doctor` prints. Messages of libraries may quote a URL with its password."""

from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from slora_api.key_masking import mask_keys, mask_passwords

__all__ = ["SecretMask"]

_URLS = ("store", "database", "redis", "quota_redis")
# Shorter secrets are not masked, because short strings occur in messages by chance.
_MIN_CHARS = 8


class SecretMask:
    """Masks secrets in messages. The secrets are taken from the values of settings. texts: setting name -> the value as
    a string; None if the setting is not given.
    """

    def __init__(self, texts: Mapping[str, str | None]) -> None:
        found = {secret for secret in _find_secrets(texts) if len(secret) >= _MIN_CHARS}
        self._secrets = sorted(found, key=len, reverse=True)

    def mask(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return mask_passwords(mask_keys(text))


def _find_secrets(texts: Mapping[str, str | None]) -> Iterator[str]:
    yield texts.get("admin_key") or ""
    for name in _URLS:
        _, _, rest = (texts.get(name) or "").partition("://")
        credentials, at, _ = rest.rpartition("@")
        password = credentials.partition(":")[2] if at else ""
        _, _, query = rest.partition("?")
        for secret in (password, query):
            yield secret
            yield unquote(secret)
