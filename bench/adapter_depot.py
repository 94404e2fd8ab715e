"""Adapters of chosen sizes, in stores and registry before a server starts on them; and how they are made cold again.

The model is a Llama of real widths (those of Qwen3-0.6B, half as many layers), so that a rank of 512 on its seven
linears is an adapter of 320 MB beside a base of 440 MB. What goes over HTTP when people upload is left out: blobs are
put into the stores, and versions into the registry, as the last step of an upload does it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.workload import ModelSize, make_adapter, write_model
from slora.models.model_spec import read_model_spec
from slora_adapters.database.database import Database
from slora_adapters.peft.adapter import DIGEST_VERSION, TENSORS_NAME, AdapterLimits
from slora_adapters.peft.peft_config import CONFIG_NAME, DIGEST_FIELD
from slora_adapters.peft.peft_directory import parse_adapter
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.store.file_store import FileStore
from slora_adapters.store.store import Store
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import lay_out_adapter
from tests.api.platform import open_tenant_store
from tests.api.served import CHARACTERS, write_tokenizer

WIDE = ModelSize(
    hidden=1024, layers=14, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=len(CHARACTERS) + 1
)
DTYPE = "bfloat16"
BLOCK_TOKENS = 16
# Holds every adapter under another name, so that no blob goes with the name that makes way.
_KEEPER = "keeper"
# bfloat16 of 0.008 and a little more for each adapter of a rank.
_FIRST_VARIANT = 0x3C00


@dataclass(frozen=True, slots=True)
class Deposit:
    """One adapter of one tenant. num_bytes: of its tensors, as a store keeps them. packed_bytes: in host and pool."""

    name: str
    version: AdapterVersion
    details: AdapterDetails

    @property
    def num_bytes(self) -> int:
        return self.details.num_bytes

    @property
    def packed_bytes(self) -> int:
        return self.details.pool_bytes


class Depot:
    """A model directory and a data directory for `slora serve`, in `folder`. warm: a store that gets each blob, too."""

    def __init__(self, folder: Path, size: ModelSize, warm: Store | None = None) -> None:
        self.model = folder / "model"
        self.data_dir = folder / "data"
        write_model(self.model, getattr(torch, DTYPE), size)
        write_tokenizer(self.model)
        self.data_dir.mkdir(mode=0o700)
        self.size = size
        self._shape = read_model_spec(self.model).shape(DTYPE)
        self._files = FileStore(self.data_dir / "adapters")
        self._stores: list[Store] = [self._files] if warm is None else [self._files, warm]
        self._database = Database(self.data_dir / "slora.db")
        self._registry = Registry(self._database)
        self._tenants = open_tenant_store(self._database, self.data_dir)
        self._names: dict[str, str] = {}
        self._num_blobs = 0

    @property
    def full_page_bytes(self) -> int:
        return self._shape.num_layers * self._shape.layer_page_bytes(BLOCK_TOKENS)

    def pages(self, num_bytes: int) -> int:
        return -(-num_bytes // self.full_page_bytes)

    def add(self, rank: int, names: Sequence[tuple[str, str]]) -> list[Deposit]:
        """Adapters of one rank that differ in a number, one for each (tenant, name)."""
        files = make_adapter(rank, getattr(torch, DTYPE), self.size, seed=rank)
        tensors = bytearray(files[TENSORS_NAME])
        limits = AdapterLimits(max_lora_rank=rank, served_dtype=DTYPE)
        deposits = []
        for tenant, name in names:
            tensors[-2:] = (_FIRST_VARIANT + self._num_blobs).to_bytes(2, "little")
            self._num_blobs += 1
            members = {**files, TENSORS_NAME: bytes(tensors)}
            views = {file: memoryview(content) for file, content in members.items()}
            adapter = parse_adapter(views, self._shape, limits)
            config = json.loads(files[CONFIG_NAME]) | {DIGEST_FIELD: DIGEST_VERSION}
            members[CONFIG_NAME] = json.dumps(config).encode()
            for store in self._stores:
                store.put(adapter.digest, members)
            packed_bytes = lay_out_adapter(self._shape, adapter.ranks(self._shape)).num_bytes
            details = AdapterDetails(rank, adapter.target_modules, adapter.tensor_bytes, packed_bytes)
            deposit = Deposit(name, AdapterVersion(self.tenant_id(tenant), adapter.digest), details)
            self._registry.put(f"{tenant}-{name}", AdapterVersion(_KEEPER, adapter.digest), details)
            self.register(deposit)
            deposits.append(deposit)
        return deposits

    def share(self, deposit: Deposit, tenant: str, name: str) -> Deposit:
        """The same weights under another tenant's name: another version, of one blob."""
        shared = Deposit(
            name, AdapterVersion(self.tenant_id(tenant), deposit.version.digest), deposit.details
        )
        self.register(shared)
        return shared

    def tenant_id(self, name: str) -> str:
        """Returns the id of a tenant. Creates the tenant at the first call."""
        if name not in self._names.values():
            self._names[self._tenants.create_tenant(name).tenant_id] = name
        return next(tenant_id for tenant_id, own in self._names.items() if own == name)

    def tenant_name(self, tenant: str) -> str:
        """Returns the name of the tenant with this id or name."""
        return self._names.get(tenant, tenant)

    def register(self, deposit: Deposit) -> None:
        self._registry.put(deposit.name, deposit.version, deposit.details)

    def tensor_file(self, deposit: Deposit) -> Path:
        """Where the file store keeps its weights."""
        return next(self._files.root.glob(f"blobs/*/{deposit.version.digest}/{TENSORS_NAME}"))

    def close(self) -> None:
        self._database.close()
