"""How long prompts and answers are. Synthetic: the means are the PagedAttention paper's, the shapes are not.

The paper (SOSP'23, figure 11) gives the mean lengths of its two traces and shows that all four are skewed to the
right, with tails to about 2,000 tokens. We draw from a lognormal distribution with sigma 1, the same for all four:
the median is 0.61 of the mean, one length in a thousand is 13 times the mean. Lengths are clipped to 1..2,048, and a
sample is scaled until its mean is the paper's, so that no figure depends on the luck of the tail.

Of ShareGPT there is a public list of lengths, whose answers have no such tail: `SHAREGPT_SHAPED`. Of Alpaca we know no
more than the means.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
MAX_TOKENS = 2048


class Shape(Protocol):
    def draw(self, count: int, random: np.random.Generator) -> FloatArray:
        """Positive numbers of any mean."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    sigma: float = 1.0

    def draw(self, count: int, random: np.random.Generator) -> FloatArray:
        return np.exp(self.sigma * random.standard_normal(count))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Straight lines between the lengths that `SHARES` of all do not exceed."""

    lengths: tuple[float, ...]

    def draw(self, count: int, random: np.random.Generator) -> FloatArray:
        return np.interp(random.random(count), SHARES, self.lengths)


SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
LOGNORMAL = Lognormal()


@dataclass(frozen=True, slots=True)
class LengthPair:
    """Mean tokens of the prompt and of the answer, and how lengths lie about them."""

    name: str
    prompt_mean: float
    output_mean: float
    prompts: Shape = LOGNORMAL
    outputs: Shape = LOGNORMAL

    def draw(self, count: int, random: np.random.Generator) -> tuple[list[int], list[int]]:
        """(prompt lengths, answer lengths), independent of each other."""
        prompts = draw_lengths(count, self.prompt_mean, random, self.prompts)
        return prompts, draw_lengths(count, self.output_mean, random, self.outputs)


SHAREGPT = LengthPair("ShareGPT-like", 161.31, 337.99)
ALPACA = LengthPair("Alpaca-like", 19.31, 58.45)
# The conversations' first turns in microsoft/sarathi-serve, data/processed_traces/sharegpt_8k_filtered_stats_llama2_
# tokenizer.csv at 72339db, of which we kept those that vLLM's benchmark would: prompts of 4 to 1,024 tokens, 2,048 with
# the answer. 5,315 turns with means of 136 and 472 tokens. Prompt and answer are uncorrelated there (0.01).
SHAREGPT_SHAPED = replace(
    SHAREGPT,
    name="ShareGPT-shaped",
    prompts=Quantiles((4, 15, 22, 31, 42, 58, 84, 121, 201, 381, 574, 901, 1024)),
    outputs=Quantiles((4, 70, 178, 311, 394, 473, 555, 633, 738, 868, 935, 1002, 1024)),
)


def draw_lengths(count: int, mean: float, random: np.random.Generator, shape: Shape = LOGNORMAL) -> list[int]:
    """Lengths whose mean is `mean`, within half a token for each of them."""
    drawn = shape.draw(count, random)
    scale = mean / float(drawn.mean())
    for _ in range(50):  # clipping takes from the tail: the rest grows until the mean is right again
        lengths = np.clip(np.rint(drawn * scale), 1, MAX_TOKENS)
        scale *= mean / float(lengths.mean())
    return [int(length) for length in lengths]
