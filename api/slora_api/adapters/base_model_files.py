"""The facts about the base model that the API reads from the model's directory, without the engine."""

import time

from slora.core.errors import ConfigError
from slora.models.model_spec import read_model_spec
from slora.text.generation_defaults import read_model_defaults
from slora.text.tokenizer import Tokenizer
from slora_adapters.peft.adapter import AdapterLimits
from slora_api.adapters.base_model import DEFAULT_MODEL, BaseIdentity, BaseModelInfo
from slora_api.core.settings import Settings


class BaseModelFiles:
    """Reads the files of the base model. The constructor raises ConfigError.

    started_at: Unix time of the server's start, which /v1/models shows.
    """

    def __init__(self, settings: Settings, started_at: int | None = None) -> None:
        self.started_at = int(time.time()) if started_at is None else started_at
        self.directory = settings.engine.model
        self.config = read_model_spec(self.directory, settings.engine.model_impl)
        self.dtype = self.config.resolve_dtype(settings.engine.dtype)
        # The server refuses a number of ranks that does not divide the model before it starts any process.
        self.shape = self.config.partition(self.dtype, settings.engine.tensor_parallel_size).shape
        self.name = settings.engine.model_name or self.directory.resolve().name
        if self.name == DEFAULT_MODEL:
            raise ConfigError(
                f"the base model is named {DEFAULT_MODEL!r}, but that name selects the default adapter of the "
                "request's API key; set another --model-name"
            )
        self.tokenizer = Tokenizer.from_directory(self.directory)
        self.limits = AdapterLimits(
            max_lora_rank=settings.engine.max_lora_rank,
            max_tensor_bytes=settings.max_upload_bytes,
            served_dtype=self.dtype,
            vocab_size=self.config.vocab_size,
            base_directory=self.directory,
            tokenizer_digests=self.tokenizer.digests,
        )

    def base(self) -> BaseModelInfo:
        identity = BaseIdentity(self.directory, (self.name, self.directory.resolve().name))
        return BaseModelInfo(self.name, identity, read_model_defaults(self.directory), self.started_at)
