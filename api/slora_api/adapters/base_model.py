"""The base model as the API describes it.

`BaseIdentity` compares the base model that an adapter was trained on with the one that this server serves:

- verified: the client sent the fingerprint of the adapter's base model, and it equals the served model's.
- name-matched: the adapter's config names a base model with the same name as the served model.
- unverified: neither the fingerprint nor the name identifies the base model. The shapes of the adapter fit, but they
also fit every fine-tune of the same base model.

`BaseModelFiles` reads the facts about it from the model's directory, without the engine.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from slora.core.errors import ConfigError
from slora.models.model_spec import find_model, read_model_spec
from slora.models.weights.checkpoint import fingerprint
from slora.text.generation_defaults import GenerationDefaults, read_model_defaults
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.hub_reference import HubReference
from slora_api.core.settings import Settings

# A request with this model name uses the default adapter of its API key.
DEFAULT_MODEL = "default"
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

logger = logging.getLogger(__name__)

BaseMatch = Literal["verified", "name-matched", "unverified"]


class BaseIdentity:
    """The base model in `directory`. names: the names by which an adapter's config may refer to the base model.

    The fingerprint is computed on first use.
    """

    def __init__(self, directory: Path, names: Collection[str]) -> None:
        self._directory = directory
        self._names = frozenset(name.lower() for name in names)
        self._computed: asyncio.Future[str | None] | None = None

    async def compare(self, claimed: str | None, base_name: str | None) -> BaseMatch:
        """Compares the base model of an adapter with the served base model.

        claimed: the fingerprint that the client sent, if any.
        base_name: the base model that the adapter's config names, if any.

        Raises AdapterInvalid if the client's fingerprint differs from that of the served base model.
        """
        own = await self._fingerprint() if claimed is not None else None
        if own is not None:
            if own == claimed:
                return "verified"
            message = (
                f"the adapter was trained on a base model with the fingerprint {claimed}, but this "
                f"server's base model has {own}: serve that base model, or train the adapter on this "
                "one"
            )
            raise AdapterInvalid((Reason("other_base", message),))
        return "name-matched" if base_name is not None and base_name.lower() in self._names else "unverified"

    async def _fingerprint(self) -> str | None:
        if self._computed is None:
            # Like `control_thread`, whose import would delay the start of the engine by the import of FastAPI.
            self._computed = asyncio.get_running_loop().run_in_executor(None, self._compute_fingerprint)
        return await asyncio.shield(self._computed)

    def _compute_fingerprint(self) -> str | None:
        try:
            return fingerprint(self._directory)
        except (ConfigError, OSError) as error:
            logger.error(
                "the fingerprint of the base model cannot be computed, so uploads are accepted without "
                "comparing it: %s",
                error,
            )
            return None


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """The base model, which all tenants share.

    root: its repository and commit on the Hugging Face hub, or its name. created_at: Unix time at which this server
    started.
    """

    name: str
    root: str
    identity: BaseIdentity
    defaults: GenerationDefaults
    created_at: int


class BaseModelFiles:
    """Reads the files of the base model. The constructor and `tokenizer` raise ConfigError.

    started_at: Unix time of the server's start, which /v1/models shows.
    """

    def __init__(self, settings: Settings, started_at: int | None = None) -> None:
        self.started_at = int(time.time()) if started_at is None else started_at
        self.directory = settings.engine.model
        self.config = read_model_spec(self.directory, settings.engine.model_impl)
        self.dtype = self.config.resolve_dtype(settings.engine.dtype)
        # The server refuses what does not suit the model before it starts any process: the length of sequences,
        # rounding its weights, and a number of ranks that does not divide it.
        self.config.check_length(settings.engine.max_model_len)
        self.config.check_quantization(settings.engine.quantization)
        self.shape = self.config.partition(self.dtype, settings.engine.tensor_parallel_size).shape
        self.name = settings.engine.served_name
        self._reference = HubReference.of_model(self.directory)
        if self.name == DEFAULT_MODEL:
            raise ConfigError(
                f"the base model is named {DEFAULT_MODEL!r}, but that name selects the default adapter of the "
                "request's API key; set another --model-name"
            )
        self._settings = settings

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read on first use. A server starts its engine before that, because a large tokenizer takes a second."""
        return Tokenizer.from_directory(self.directory)

    @cached_property
    def limits(self) -> AdapterLimits:
        return AdapterLimits(
            max_lora_rank=self._settings.engine.max_lora_rank,
            max_tensor_bytes=self._settings.max_upload_bytes,
            served_dtype=self.dtype,
            vocab_size=self.config.vocab_size,
            base_directory=self.directory,
            tokenizer_digests=self.tokenizer.digests,
        )

    def base(self) -> BaseModelInfo:
        names = {self.name, self.directory.resolve().name}
        if self._reference is not None:
            names.add(self._reference.name)
        return BaseModelInfo(
            self.name,
            self.name if self._reference is None else str(self._reference),
            BaseIdentity(self.directory, names),
            read_model_defaults(self.directory),
            self.started_at,
        )


def with_local_model(
    settings: Settings, flags: Mapping[str, Any], tell: Callable[[str], Any]
) -> tuple[Settings, dict[str, Any]]:
    """Downloads a base model that is named by its repository on the hub. Returns settings and flags with its directory.

    The token of the hub is then removed from this process's environment, so that no child gets it, unless the store is
    on the hub, too. Raises ConfigError. tell: see `find_model`.
    """
    engine = settings.engine
    directory = find_model(engine.model, engine.model_impl, tell=tell)
    if not settings.store.startswith("hf://"):
        for name in _HUB_TOKENS:
            os.environ.pop(name, None)
    return replace(settings, engine=replace(engine, model=directory)), {**flags, "model": str(directory)}
