"""What a comparison with peft found, and whether that is equal: by tokens, by log-probabilities, module by module.

Tokens are judged as the project's own tests judge them: the same, or the judge was undecided. The finer measures have
limits that rounding never reaches and a wrong scale always does. Knows no model and no tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["TOLERANCES", "ModuleCheck", "PromptCheck", "Tolerance", "Verification", "find_problems"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Differences that rounding explains. logprob: of one token, in nats. delta: of a module's output, relative to its
    largest entry. margin: log-probability between the judge's two best tokens below which either is right.
    excused: of all tokens, the share that may differ for that reason; one always may, because few are judged.
    """

    logprob: float
    delta: float
    margin: float
    excused: float


# Measured on tiny models and the demo: 1e-5 and 1e-6 in float32; in bfloat16, where both sides round after each
# operation, 0.04 and 0.005, and 0 to 2 tokens of 64: two best tokens are often as near as that.
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-3, 1e-4, 1e-4, 1e-3),
    "float16": Tolerance(0.1, 1e-2, 0.2, 0.05),
    "bfloat16": Tolerance(0.5, 2e-2, 1.0, 0.1),
}


@dataclass(frozen=True, slots=True)
class ModuleCheck:
    """path: from the model's root. deviation: of our delta from peft's, relative to the largest entry of peft's."""

    path: str
    rank: int
    scale: float
    deviation: float


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """One answer. wrong: tokens that peft would not have chosen; excused: those where it was undecided.

    logprob, peft_logprob: mean over the answer's tokens; deviation: the largest of one token.
    effect: KL divergence of the adapter's next-token distributions from the base's, mean over all tokens, in nats.
    changed: share of tokens after which the adapter's favourite is another than the base's.
    """

    prompt: str | None
    prompt_tokens: int
    answer_tokens: int
    wrong: int
    excused: int
    logprob: float
    peft_logprob: float
    deviation: float
    effect: float
    changed: float


@dataclass(frozen=True, slots=True)
class Verification:
    """only_here, only_peft: modules that one side adapts and the other does not. not_served: what else lies in the
    directory. problems: why it is not equal; none if it is. warnings: what an author should know anyway.
    """

    dtype: str
    kernels: str
    num_modules: int
    modules: tuple[ModuleCheck, ...]
    only_here: tuple[str, ...]
    only_peft: tuple[str, ...]
    prompts: tuple[PromptCheck, ...]
    not_served: tuple[str, ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.problems


def find_problems(
    modules: Sequence[ModuleCheck], prompts: Sequence[PromptCheck], only: Sequence[str], limit: Tolerance
) -> list[str]:
    """Why the two sides are not equal; nothing if they are. only: paths of modules that one side alone adapts."""
    problems = [f"{path} is adapted by one side only" for path in only]
    off = sorted(
        (check for check in modules if not check.deviation <= limit.delta), key=lambda check: -check.deviation
    )
    problems += [
        f"{check.path}: what is added deviates by {check.deviation:.2g} of its largest entry "
        f"(at most {limit.delta:g})"
        for check in off
    ]
    excused = sum(check.excused for check in prompts)
    num_tokens = sum(check.answer_tokens for check in prompts)
    if excused > max(1.0, limit.excused * num_tokens):
        problems.append(
            f"{excused} of {num_tokens} tokens differ where peft is undecided; at most {limit.excused:.1%} may"
        )
    for number, check in enumerate(prompts, 1):
        if check.wrong:
            problems.append(f"prompt {number}: {check.wrong} of {check.answer_tokens} tokens are not peft's")
        if not check.deviation <= limit.logprob:
            problems.append(
                f"prompt {number}: a log-probability deviates by {check.deviation:.2g} (at most {limit.logprob:g})"
            )
    return problems
