"""The files of an adapter as stores keep them: the blob that a digest names.

A blob holds two members: the config, rewritten from the fields that change the arithmetic, and the tensor file: as it
was uploaded if its tensors lie in the order of names and are all needed, else written anew, in that order, without what
PEFT copied into it from the base model. So whoever reads a blob from its begin to its end has the tensors in the order
in which they are hashed.

Its key is the digest of the arithmetic (`digest.py`), not of the bytes: whoever reads a blob (`stored_adapter.py`)
recomputes that digest from what it read, and so checks exactly what it is about to serve. Every blob of one digest
computes the same, so tenants who upload the same weights share one at rest; what is theirs alone (names, chat template,
sampling defaults, where they trained) is not in it but in the registry.
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
    """The members to put into a store, for an adapter that `read_adapter` read from `directory`.

    scratch: another directory, for a tensor file that has to be written anew.
    """
    # Not sorted: the order of patterns decides which one wins.
    config = json.dumps(adapter.config.to_json(), indent=1).encode()
    if adapter.has_copies or not adapter.is_sorted:
        factors = [tensor for pair in adapter.pairs.values() for tensor in (pair.a, pair.b)]
        with (scratch / TENSORS_NAME).open("xb") as file:
            file.writelines(tensor_file_parts(factors))
        return {CONFIG_NAME: config, TENSORS_NAME: scratch / TENSORS_NAME}
    return {CONFIG_NAME: config, TENSORS_NAME: Path(directory) / TENSORS_NAME}
