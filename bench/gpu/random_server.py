"""`slora serve` with a random model and random adapters, for a machine without a checkpoint.

    python -m bench.gpu.random_server --scale whole --folder DIR --adapters 32 -- FLAGS of slora serve

DIR gets a config.json, a tokenizer of the model's vocabulary, and a data directory in which each of the tenants
`tenant-N` has an adapter `adapter`. The engine process makes its weights on the device; everything else is as in
`slora serve`. All tenants have the same weights, but each of them is an adapter of its own for the engine.
"""

import argparse
import json
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.gpu.random_engine import SIZES, EngineSize
from bench.workload import ModelSize, make_adapter
from slora.models.model_spec import read_model_spec
from slora_adapters.database.database import Database
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.peft_directory import parse_adapter
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.store.file_store import FileStore
from slora_adapters.version import AdapterVersion
from slora_api.cli.main import main as run_slora
from slora_api.core.data_dir import DataDir
from slora_api.keys.key_record import Pepper
from slora_api.keys.key_store import KeyStore, RevocationJournal
from slora_api.processes.supervisor import Child
from slora_api.serve import serve
from slora_api.tenants.tenant_store import TenantStore
from slora_kernels.layout import lay_out_adapter

RANK = 16
_FIRST_PRINTABLE = 33


def write_model(directory: Path, size: EngineSize) -> None:
    directory.mkdir(parents=True)
    size.write_config(directory)
    # Each id is a word of its own, so that each token of an answer is text.
    vocabulary = {
        f"Ġ{chr(_FIRST_PRINTABLE + token % 90)}{token}": token for token in range(size.fields["vocab_size"])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "TokenizersBackend"}), encoding="utf-8"
    )


def deposit_adapters(model: Path, data: Path, size: EngineSize, num_adapters: int) -> None:
    """Makes the tenants, and puts an adapter into store and registry for each of them."""
    data.mkdir(mode=0o700, parents=True)
    fields = size.fields
    widths = ModelSize(
        hidden=fields["hidden_size"],
        layers=fields["num_hidden_layers"],
        heads=fields["num_attention_heads"],
        kv_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        intermediate=fields["intermediate_size"],
        vocab=fields["vocab_size"],
    )
    members = make_adapter(RANK, getattr(torch, size.dtype), widths, seed=1)
    shape = read_model_spec(model).shape(size.dtype)
    limits = AdapterLimits(max_lora_rank=RANK, served_dtype=size.dtype)
    adapter = parse_adapter({name: memoryview(content) for name, content in members.items()}, shape, limits)
    FileStore(data / "adapters").put(adapter.digest, members)
    pool_bytes = lay_out_adapter(shape, adapter.ranks(shape)).num_bytes
    details = AdapterDetails(RANK, adapter.target_modules, adapter.tensor_bytes, pool_bytes)
    place = DataDir(data)
    with ExitStack() as stack:
        database = stack.enter_context(closing(Database(place.database)))
        journal = stack.enter_context(closing(RevocationJournal(place.revocations)))
        tenants = TenantStore(database, KeyStore(database, Pepper.from_file(place.pepper), journal))
        registry = Registry(database)
        for number in range(num_adapters):
            tenant = tenants.create_tenant(f"tenant-{number}").tenant_id
            registry.put("adapter", AdapterVersion(tenant, adapter.digest), details)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=list(SIZES), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--adapters", type=int, required=True)
    parser.add_argument("flags", nargs="*", help="of `slora serve`, after --")
    options = parser.parse_args()
    size = SIZES[options.scale]
    model, data = options.folder / "model", options.folder / "data"
    write_model(model, size)
    deposit_adapters(model, data, size, options.adapters)
    make_children = serve.engines_and_loader

    def with_random_engine(*given: Any) -> list[Child]:
        loader, engine = make_children(*given)
        return [loader, replace(engine, module="bench.gpu.random_engine")]

    serve.engines_and_loader = with_random_engine
    pool = ["--pool-bytes", str(size.pool_bytes), "--max-model-len", str(size.max_model_len)]
    given = [
        "--model",
        str(model),
        "--data-dir",
        str(data),
        "--device",
        size.device,
        "--dtype",
        size.dtype,
        *pool,
    ]
    return run_slora(["serve", *given, *options.flags])


if __name__ == "__main__":
    sys.exit(main())
