"""How long prompts and answers are. Synthetic: the means are the PagedAttention paper's, the shapes are ours.

The paper (SOSP'23, figure 11) gives the mean lengths of its two traces and shows that all four are skewed to the
right, with tails to about 2,000 tokens. We draw from a lognormal distribution with sigma 1, the same for all four:
the median is 0.61 of the mean, one length in a thousand is 13 times the mean. Lengths are clipped to 1..2,048, and a
sample is scaled until its mean is the paper's, so that no figure depends on the luck of the tail.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
MAX_TOKENS = 2048
SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class LengthPair:
    """Mean tokens of the prompt and of the answer."""

    name: str
    prompt_mean: float
    output_mean: float

    def draw(
        self, count: int, random: np.random.Generator, sigma: float = SIGMA
    ) -> tuple[list[int], list[int]]:
        """(prompt lengths, answer lengths), independent of each other."""
        prompts = draw_lengths(count, self.prompt_mean, random, sigma)
        return prompts, draw_lengths(count, self.output_mean, random, sigma)


SHAREGPT = LengthPair("ShareGPT-like", 161.31, 337.99)
ALPACA = LengthPair("Alpaca-like", 19.31, 58.45)


def draw_lengths(count: int, mean: float, random: np.random.Generator, sigma: float = SIGMA) -> list[int]:
    """Lognormal lengths whose mean is `mean`, within half a token for each of them."""
    shape = np.exp(sigma * random.standard_normal(count))
    scale = mean / float(shape.mean())
    for _ in range(50):  # clipping takes from the tail: the rest grows until the mean is right again
        lengths = np.clip(np.rint(shape * scale), 1, MAX_TOKENS)
        scale *= mean / float(lengths.mean())
    return [int(length) for length in lengths]
