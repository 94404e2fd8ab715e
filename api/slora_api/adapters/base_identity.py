"""Whether an adapter was trained on the very base model that is served here: as far as anybody can know.

verified: the uploader sent the fingerprint of the base that it was trained on, and it is ours. name-matched: its config
names a base that is called like ours. unverified: neither; shapes fit, but so do those of every fine-tune of the base.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from slora.errors import ConfigError
from slora.weights.base_fingerprint import fingerprint
from slora_adapters.errors import AdapterInvalid, Reason

__all__ = ["BaseIdentity"]

logger = logging.getLogger(__name__)


class BaseIdentity:
    """The base model in `directory`, which goes by `names`. Its fingerprint is taken when it is first asked for."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._names = frozenset(name.lower() for name in names)
        self._taken: asyncio.Future[str | None] | None = None

    async def compare(self, claimed: str | None, base_name: str | None) -> str:
        """verified, name-matched or unverified. claimed: a fingerprint; base_name: what the adapter's config says.

        Raises AdapterInvalid for the fingerprint of another base.
        """
        own = await self._fingerprint() if claimed is not None else None
        if own is not None:
            if own == claimed:
                return "verified"
            message = (
                f"the adapter was trained on a base with the fingerprint {claimed}; the base served here has {own}: "
                "serve that base, or train the adapter on this one"
            )
            raise AdapterInvalid((Reason("other_base", message),))
        return "name-matched" if base_name is not None and base_name.lower() in self._names else "unverified"

    async def _fingerprint(self) -> str | None:
        if self._taken is None:
            self._taken = asyncio.ensure_future(asyncio.to_thread(self._take))
        return await asyncio.shield(self._taken)

    def _take(self) -> str | None:
        try:
            return fingerprint(self._directory)
        except (ConfigError, OSError) as error:
            logger.error("the base model's fingerprint can't be taken, so none is verified: %s", error)
            return None
