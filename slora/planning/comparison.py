"""Sets the slices of a GPU beside the whole of it, under one load."""

from dataclasses import replace

from slora.errors import ConfigError
from slora.planning.devices import cut_device
from slora.planning.plan import Plan, Progress, Question, make_plan

__all__ = ["compare_slices"]

_MPS_SHARES = ("50%", "25%")


def compare_slices(question: Question, progress: Progress, *, max_tokens: int) -> dict[str, Plan | str]:
    """The plans of the whole device, of each MIG profile, and of MPS shares, by name. A text says why there is no plan.

    Each slice is an engine of its own. The adapters are divided among the engines, and requests follow them.
    """
    whole = question.device
    # The last profile is the whole GPU again.
    profiles = list(whole.profiles)[:-1]
    devices = [whole, *(cut_device(whole, name) for name in (*profiles, *_MPS_SHARES))]
    plans: dict[str, Plan | str] = {}
    for device in devices:
        try:
            plans[device.name] = make_plan(replace(question, device=device), progress, max_tokens=max_tokens)
        except ConfigError as error:
            plans[device.name] = str(error)
    return plans
