"""The result of a comparison with peft: token by token, by log-probability and module by module.

A token passes if both sides chose it, or if the reference's two best tokens are almost equally probable. The project's
tests use the same rule. Differences of log-probabilities and of module outputs have limits that rounding never reaches
and that a wrong scale always exceeds. This module uses neither models nor tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["TOLERANCES", "ModuleCheck", "PromptCheck", "Tolerance", "Verification", "find_problems"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The greatest differences that rounding can explain.

    logprob: the difference for one token, in nats. delta: the difference of a module's output, relative to its largest
        entry.
    margin: if the reference's two most probable tokens differ by less log-probability than this, either one passes.
    excused: share of all tokens that may differ for that reason. One token may always differ, because few are compared.
    """

    logprob: float
    delta: float
    margin: float
    excused: float


# Differences measured on tiny models and the demo. float32: 1e-5 for logprob and 1e-6 for delta. bfloat16, where both
# sides round after each operation: 0.04 for logprob, 0.005 for delta, and 0 to 2 of 64 tokens, because the two best
# tokens are often almost equally probable.
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-3, 1e-4, 1e-4, 1e-3),
    "float16": Tolerance(0.1, 1e-2, 0.2, 0.05),
    "bfloat16": Tolerance(0.5, 2e-2, 1.0, 0.1),
}


@dataclass(frozen=True, slots=True)
class ModuleCheck:
    """The comparison of one module. path: from the model's root.

    deviation: the largest difference between our delta and peft's, relative to the largest entry of peft's delta.
    """

    path: str
    rank: int
    scale: float
    deviation: float


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """The comparison of one answer.

    wrong: tokens that peft would not have chosen. excused: differing tokens where peft was undecided.
    logprob, peft_logprob: mean log-probability of the answer's tokens, on our side and on peft's.
    deviation: the largest difference between our log-probability of a token and peft's.
    effect: mean KL divergence per token between next-token distributions with and without the adapter, in nats.
    changed: share of tokens after which the argmax with the adapter differs from the argmax of the base.
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
    """The result for one adapter.

    only_here: modules that only this engine adapts. only_peft: modules that only peft adapts.
    not_served: files in the adapter's directory that serving does not use.
    problems: why the two sides are not equal; empty if they are. warnings: further facts for the adapter's author.
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
    """Returns why the two sides are not equal, or an empty list. only: paths of modules that only one side adapts."""
    problems = [f"only one of slora and peft adapts {path}" for path in only]
    off = sorted(
        (check for check in modules if not check.deviation <= limit.delta), key=lambda check: -check.deviation
    )
    problems += [
        f"{check.path}: the LoRA delta deviates by {check.deviation:.2g} of its largest entry (limit "
        f"{limit.delta:g})"
        for check in off
    ]
    excused = sum(check.excused for check in prompts)
    num_tokens = sum(check.answer_tokens for check in prompts)
    if excused > max(1.0, limit.excused * num_tokens):
        problems.append(
            f"{excused} of {num_tokens} tokens differ where two tokens are almost equally probable "
            f"for peft (limit {limit.excused:.1%})"
        )
    for number, check in enumerate(prompts, 1):
        if check.wrong:
            problems.append(
                f"prompt {number}: {check.wrong} of {check.answer_tokens} tokens differ from peft's"
            )
        if not check.deviation <= limit.logprob:
            problems.append(
                f"prompt {number}: a log-probability deviates by {check.deviation:.2g} (limit "
                f"{limit.logprob:g})"
            )
    return problems
