"""Compares a whole GPU with its slices under the same load."""

from dataclasses import replace

from slora.errors import ConfigError
from slora.planning.devices import cut_device
from slora.planning.plan import Plan, Progress, Question, make_plan

__all__ = ["compare_slices"]

_MPS_SHARES = ("50%", "25%")


def compare_slices(question: Question, progress: Progress, *, max_tokens: int) -> dict[str, Plan | str]:
    """Returns plans for the whole device, for each MIG profile and for some MPS shares, by name.

    If a slice can't be planned, its entry is the reason as a string. Each slice runs its own engine. The adapters are
    divided among the engines, and each request goes to the engine that has its adapter.
    """
    whole = question.device
    # The last profile is the whole GPU, which is already in the list.
    profiles = list(whole.profiles)[:-1]
    devices = [whole, *(cut_device(whole, name) for name in (*profiles, *_MPS_SHARES))]
    plans: dict[str, Plan | str] = {}
    for device in devices:
        try:
            plans[device.name] = make_plan(replace(question, device=device), progress, max_tokens=max_tokens)
        except ConfigError as error:
            plans[device.name] = str(error)
    return plans
