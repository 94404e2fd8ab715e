"""Reads the tokenizer that transformers builds from a model directory.

    python -P -m slora.text.transformers_tokenizer DIR      prints a ResolvedTokenizer as JSON

A process that has not imported torch runs this module in a subprocess.
"""

import gc

if __name__ == "__main__":
    # Garbage collection would slow down the import of transformers and find no garbage.
    gc.disable()

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from slora.core.errors import ConfigError
from slora.text.resolved_tokenizer import SPECIAL_NAMES, ResolvedTokenizer


def read_tokenizer(directory: Path) -> ResolvedTokenizer:
    """Reads the tokenizer. Raises ConfigError if transformers can't read it or if it does not use a tokenizer.json."""
    try:
        found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Each class raises its own errors.
        raise ConfigError(f"{directory}: transformers can't read the tokenizer: {error}") from error
    if not isinstance(found, PreTrainedTokenizerFast):
        kind = type(found).__name__
        raise ConfigError(
            f"{directory}: transformers reads the tokenizer as {kind}, which has no tokenizer.json"
        )
    tokens = {name: getattr(found, name) for name in SPECIAL_NAMES}
    return ResolvedTokenizer(
        _serialize(found.backend_tokenizer),
        {name: str(token) for name, token in tokens.items() if token is not None},
        bool(found.split_special_tokens),
    )


def _serialize(backend: Tokenizer) -> str:
    """Serializes the backend, and marks all tokens that decoding leaves out as special.

    A special token may have been added again as an ordinary token. Decoding leaves it out, although the backend does
    not mark it as special.
    """
    fields = json.loads(backend.to_str())
    for token in fields["added_tokens"]:
        token_ids = [token["id"]]
        shown = [backend.decode(token_ids, skip_special_tokens=skip) for skip in (True, False)]
        token["special"] |= shown[0] != shown[1]
    return json.dumps(fields)


def main() -> int:
    """Prints the tokenizer, or the reason why there is none."""
    parser = argparse.ArgumentParser(description="Reads a tokenizer as transformers does.")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()
    try:
        with redirect_stdout(sys.stderr):
            fields = asdict(read_tokenizer(options.directory))
    except ConfigError as error:
        fields = {"refused": str(error)}
    print(json.dumps(fields))
    return 0


if __name__ == "__main__":
    sys.exit(main())
