"""Synthetic lengths of prompts and answers. Only their means come from the PagedAttention paper.

The paper (SOSP'23, figure 11) gives the mean lengths of prompts and answers in its two traces. It shows that all four
distributions are skewed to the right, with tails to about 2,000 tokens. Here all four are lognormal with sigma 1: the
median is 0.61 of the mean, and one length in a thousand is 13 times the mean. Lengths are clipped to 1..2,048. Each
sample is scaled until its mean is the paper's, so that no result depends on the few longest lengths.

For ShareGPT there is also a public list of lengths, in which answers have no such tail. `SHAREGPT_SHAPED` follows this
list. For Alpaca only the means are known.
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
        """Draws `count` positive numbers. Their mean does not matter, because the caller scales them."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    sigma: float = 1.0

    def draw(self, count: int, random: np.random.Generator) -> FloatArray:
        return np.exp(self.sigma * random.standard_normal(count))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution given by its quantiles, with linear interpolation between them.

    lengths: a share `SHARES[i]` of all lengths is at most `lengths[i]`.
    """

    lengths: tuple[float, ...]

    def draw(self, count: int, random: np.random.Generator) -> FloatArray:
        return np.interp(random.random(count), SHARES, self.lengths)


SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
LOGNORMAL = Lognormal()


@dataclass(frozen=True, slots=True)
class LengthPair:
    """The mean tokens of prompts and of answers, and the shapes of both distributions.

    most_prompt, most_output: the maximum lengths. Longer prompts and answers are clipped.
    """

    name: str
    prompt_mean: float
    output_mean: float
    prompts: Shape = LOGNORMAL
    outputs: Shape = LOGNORMAL
    most_prompt: int = MAX_TOKENS
    most_output: int = MAX_TOKENS

    def draw(self, count: int, random: np.random.Generator) -> tuple[list[int], list[int]]:
        """Returns the lengths of `count` prompts and `count` answers, drawn independently."""
        prompts = draw_lengths(count, self.prompt_mean, random, self.prompts, self.most_prompt)
        return prompts, draw_lengths(count, self.output_mean, random, self.outputs, self.most_output)


SHAREGPT = LengthPair("ShareGPT-like", 161.31, 337.99)
ALPACA = LengthPair("Alpaca-like", 19.31, 58.45)
# The first turns of the conversations in data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv of
# microsoft/sarathi-serve at 72339db. As in vLLM's benchmark, only prompts of 4 to 1,024 tokens count, and only turns of
# at most 2,048 tokens with the answer. This leaves 5,315 turns, with means of 136 and 472 tokens. The lengths of
# prompts and answers are uncorrelated (0.01).
SHAREGPT_SHAPED = replace(
    SHAREGPT,
    name="ShareGPT-shaped",
    prompts=Quantiles((4, 15, 22, 31, 42, 58, 84, 121, 201, 381, 574, 901, 1024)),
    outputs=Quantiles((4, 70, 178, 311, 394, 473, 555, 633, 738, 868, 935, 1002, 1024)),
)


def draw_lengths(
    count: int, mean: float, random: np.random.Generator, shape: Shape = LOGNORMAL, most: int = MAX_TOKENS
) -> list[int]:
    """Draws whole lengths whose mean is within half a token of `mean`."""
    drawn = shape.draw(count, random)
    scale = mean / float(drawn.mean())
    # Clipping the tail lowers the mean, so all lengths are scaled until the mean is right again.
    for _ in range(50):
        lengths = np.clip(np.rint(drawn * scale), 1, most)
        scale *= mean / float(lengths.mean())
    return [int(length) for length in lengths]
