"""Builds the files of an adapter as stores keep them: the blob of a digest.

A blob has two members: the config and the tensor file. The config is rewritten from the fields that change the
arithmetic. The uploaded tensor file is kept if its tensors are in name order and all of them are needed. Otherwise it
is rewritten in name order, without the tensors that PEFT copied into it from the base model. The digest hashes tensors
in name order too, so a loader can hash a blob while it reads the file sequentially.

The key of a blob is the digest of the arithmetic (`digest.py`), not of the bytes. The reader of a blob
(`stored_adapter.py`) recomputes that digest from the bytes that it has read. So exactly the weights that will be served
are verified.

All blobs of one digest compute the same results, so tenants that upload the same weights share one stored blob. Data of
one tenant (names, chat template, sampling defaults, origin) is kept in the registry, not in the blob.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from slora_adapters.peft.adapter import Adapter
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import TENSORS_NAME
from slora_adapters.peft.tensor_file import tensor_file_parts

Members = Mapping[str, Path | bytes]


def bundle(adapter: Adapter, directory: Path | str, scratch: Path) -> Members:
    """Returns the members to put into a store, for an adapter that `read_adapter` read from `directory`.

    scratch: another directory, for a tensor file that has to be rewritten.
    """
    # The JSON is not sorted, because the order of patterns decides which pattern wins.
    config = json.dumps(adapter.config.to_json(), indent=1).encode()
    if adapter.has_unused or not adapter.is_sorted:
        factors = [tensor for pair in adapter.pairs.values() for tensor in (pair.a, pair.b)]
        with (scratch / TENSORS_NAME).open("xb") as file:
            file.writelines(tensor_file_parts(factors))
        return {CONFIG_NAME: config, TENSORS_NAME: scratch / TENSORS_NAME}
    return {CONFIG_NAME: config, TENSORS_NAME: Path(directory) / TENSORS_NAME}
