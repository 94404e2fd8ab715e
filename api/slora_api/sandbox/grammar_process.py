"""A process that compiles the forms of structured output: `python -m slora_api.sandbox.grammar_process LIMIT`.

The engine compiles each form again, for its own vocabulary. This process finds out whether that is safe. On a hostile
form, the library may compute for minutes, take gigabytes or overflow the stack. Such a form ends only this process.
LIMIT is in CPU seconds.
"""

import random
import sys
import threading
from collections.abc import Mapping
from functools import partial

import numpy as np

from slora.core.errors import RequestRefused
from slora.core.sampling_params import OutputKind, StructuredOutput
from slora.grammar.lark_grammar import GrammarLibrary, LarkGrammar
from slora.grammar.matcher import TokenSpelling
from slora_api.sandbox.sandbox import serve_requests

# The vocabulary has all single bytes and an end token. Compiling for it costs at least as much as for a model's
# vocabulary.
_EOS = 256
_SPELLING = TokenSpelling([*(bytes([byte]) for byte in range(_EOS)), b""])


# The stack of the compiling thread. A form that compiles on this stack also compiles on the engine's threads, whose
# stacks are four times as large.
_STACK_BYTES = 2 << 20
# The number of tokens in the random answer of `_try`.
_TRIAL_TOKENS = 100


def _compile(library: GrammarLibrary, request: Mapping[str, str]) -> tuple[str | None, str | None]:
    output = StructuredOutput(OutputKind(request["kind"]), request["text"], request["param"])
    try:
        _try(library.compile(output))
    except RequestRefused as error:
        return None, error.message
    except (MemoryError, RecursionError, ValueError, TypeError) as error:
        return None, f"{output.param} can't be compiled: {error or type(error).__name__}"
    return "", None


def _try(grammar: LarkGrammar) -> None:
    """Tries the compiled form: writes masks for the first tokens of a random answer, because a later mask may fail in
    the library even if the first mask works.
    """
    rng, matcher = random.Random(0), grammar.start({_EOS})
    words = np.empty(-(-len(_SPELLING.pieces) // 32), np.int32)
    for _ in range(_TRIAL_TOKENS):
        matcher.write_mask(words)
        bits = np.unpackbits(words.view(np.uint8), count=_EOS, bitorder="little")
        if not bits.any():
            return
        matcher.accept(int(rng.choice(np.flatnonzero(bits))))


def main() -> None:
    """Answers requests until stdin is closed."""
    library = GrammarLibrary(_SPELLING, [_EOS])
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=serve_requests, args=(partial(_compile, library), float(sys.argv[1])))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
