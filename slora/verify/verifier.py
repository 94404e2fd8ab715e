"""Checks that an adapter is served as trained: compares our answers and deltas with those of transformers and peft.

The reference scores greedy answers of the whole engine, token by token. Both sides also compute what each adapted
module adds to its output for the same inputs, which identifies a wrong module. The two sides run one after the other,
so that only one copy of the base model is in memory at a time.
"""

import gc
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slora.core.sampling_params import SamplingParams
from slora.llm.llm import LLM
from slora.llm.lora_adapter import LoraAdapter
from slora.llm.request_builder import Prompt, read_content
from slora.models.model_spec_reader import read_model_spec
from slora.text.answer import Completion
from slora.verify.lora_probe import probe_adapter, probe_inputs
from slora.verify.peft_reference import PeftReference
from slora.verify.verification import TOLERANCES, ModuleCheck, PromptCheck, Verification, find_problems
from slora_adapters.limits import AdapterLimits
from slora_adapters.peft.adapter import Adapter
from slora_adapters.peft.packing import pack
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import MEMBER_NAMES
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.layout import ModelShape

__all__ = ["VerificationRequest", "verify_adapter"]

# Lengths of the random prompts: shorter and longer than a page of 16 tokens, and one longer than two pages.
_DEFAULT_LENGTHS = (1, 7, 17, 40)
# In nats. An adapter with a smaller effect counts as having no effect.
_NO_EFFECT = 1e-6


@dataclass(frozen=True, slots=True)
class VerificationRequest:
    """The input of a comparison. prompts: texts; if empty, random tokens. max_lora_rank: the server's limit."""

    model: Path
    directory: Path
    prompts: tuple[str, ...] = ()
    max_tokens: int = 16
    dtype: str = "float32"
    device: str = "auto"
    max_lora_rank: int = 128


@dataclass(frozen=True, slots=True)
class _EngineResults:
    """The results of this engine: answers, and deltas by the path of the module."""

    answers: list[Completion]
    deltas: dict[str, Tensor]
    kernels: str
    device: torch.device


def verify_adapter(request: VerificationRequest, served: LoraAdapter | None = None) -> Verification:
    """Compares this engine with transformers and peft.

    served: an adapter that this engine serves instead of the one in the directory. Tests use it to prove that a
        difference is found.

    Raises ConfigError if the model can't be served. Raises AdapterNotFound, or AdapterInvalid with all reasons, if the
    adapter can't be served.
    """
    spec = read_model_spec(request.model)
    dtype_name = spec.resolve_dtype(request.dtype)
    shape, dtype = spec.shape(dtype_name), getattr(torch, dtype_name)
    limits = AdapterLimits(
        request.max_lora_rank,
        served_dtype=dtype_name,
        vocab_size=spec.vocab_size,
        base_directory=request.model,
    )
    own = served or LoraAdapter(request.directory)
    adapter = read_content(own.content, shape, limits)
    ours = _run_engine(request, own, adapter, shape, dtype_name)
    reference = PeftReference(request.model, request.directory, dtype, ours.device)
    modules = tuple(_compare_modules(ours, reference, adapter, shape, dtype))
    prompts = tuple(
        _compare_answer(reference, answer, text, TOLERANCES[dtype_name].margin)
        for answer, text in zip(ours.answers, request.prompts or [None] * len(ours.answers), strict=True)
    )
    here = frozenset(pair.path for pair in adapter.pairs.values())
    only_here, only_peft = sorted(here - reference.adapted), sorted(reference.adapted - here)
    return Verification(
        dtype=dtype_name,
        kernels=ours.kernels,
        num_modules=shape.num_modules,
        modules=modules,
        only_here=tuple(only_here),
        only_peft=tuple(only_peft),
        prompts=prompts,
        not_served=_find_unserved_files(request.directory),
        warnings=(*reference.notes, *_find_warnings(prompts, request)),
        problems=tuple(find_problems(modules, prompts, only_here + only_peft, TOLERANCES[dtype_name])),
    )


def _run_engine(
    request: VerificationRequest, served: LoraAdapter, adapter: Adapter, shape: ModelShape, dtype: str
) -> _EngineResults:
    """Computes this engine's side. The model is freed before this function returns."""
    llm = LLM(request.model, dtype=dtype, device=request.device, max_lora_rank=request.max_lora_rank)
    random_prompts = _random_prompts(llm.info.vocab_size, llm.info.max_model_len, request.max_tokens)
    prompts: Sequence[Prompt] = request.prompts or random_prompts
    params = SamplingParams(request.max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    answers = llm.generate(prompts, params, served)
    device = torch.device(llm.info.device)
    kernels = select_kernels(llm.info.kernels, device)
    del llm
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    packed = pack(adapter, shape, dtype)
    deltas = probe_adapter(packed, shape, getattr(torch, dtype), kernels, device, weight=served.weight)
    by_path = {adapter.pairs[module].path: delta for module, delta in deltas}
    return _EngineResults(answers, by_path, kernels.name, device)


def _random_prompts(vocab_size: int, max_len: int, max_tokens: int) -> list[list[int]]:
    """Makes prompts of random tokens. They are sufficient: two programs that agree on them also agree on text."""
    rng = random.Random(0)
    room = max(1, max_len - max_tokens)
    return [[rng.randrange(vocab_size) for _ in range(min(length, room))] for length in _DEFAULT_LENGTHS]


def _compare_modules(
    ours: _EngineResults, reference: PeftReference, adapter: Adapter, shape: ModelShape, dtype: torch.dtype
) -> list[ModuleCheck]:
    checks = []
    for site in shape.sites:
        for module in range(site.first_module, site.first_module + len(site.widths)):
            pair = adapter.pairs.get(module)
            if pair is not None and pair.path in reference.adapted:
                theirs = reference.delta(pair.path, probe_inputs(shape, site, dtype))
                deviation = _relative_difference(ours.deltas[pair.path], theirs)
                checks.append(ModuleCheck(pair.path, pair.rank, pair.scale, deviation))
    return checks


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    largest = float(theirs.abs().max())
    difference = float((ours - theirs).abs().max())
    return difference / largest if largest else difference


def _compare_answer(
    reference: PeftReference, answer: Completion, text: str | None, margin: float
) -> PromptCheck:
    """Compares by teacher forcing: the reference reads prompt and answer at once, with the adapter and without."""
    prompt, tokens = answer.prompt_token_ids, torch.tensor(answer.token_ids)
    read = answer.token_ids[:-1]  # Nothing was sampled after the last token.
    adapted = reference.logits(prompt, read, adapted=True).log_softmax(dim=-1)
    base = reference.logits(prompt, read, adapted=False).log_softmax(dim=-1)
    rows = adapted[len(prompt) - 1 :]
    best, top_tokens = rows.topk(2, dim=-1)
    differs, undecided = top_tokens[:, 0] != tokens, best[:, 0] - best[:, 1] < margin
    theirs = rows.gather(1, tokens[:, None])[:, 0]
    ours = torch.tensor([entry.logprob for entry in answer.logprobs or ()])
    return PromptCheck(
        prompt=text,
        prompt_tokens=len(prompt),
        answer_tokens=len(tokens),
        wrong=int((differs & ~undecided).sum()),
        excused=int((differs & undecided).sum()),
        logprob=float(ours.mean()),
        peft_logprob=float(theirs.mean()),
        deviation=float((ours - theirs).abs().max()),
        effect=float((adapted.exp() * (adapted - base)).sum(dim=-1).mean().clamp_min(0)),
        changed=float((adapted.argmax(dim=-1) != base.argmax(dim=-1)).float().mean()),
    )


def _find_warnings(prompts: Sequence[PromptCheck], request: VerificationRequest) -> list[str]:
    warnings = []
    if all(check.effect < _NO_EFFECT for check in prompts):
        warnings.append(
            "the adapter has no effect: its answers equal those of the base model; check that it was "
            "saved after training"
        )
    config = json.loads((request.directory / CONFIG_NAME).read_text(encoding="utf-8"))
    trained_on = str(config.get("base_model_name_or_path") or "")
    if trained_on and Path(trained_on).name not in str(request.model.resolve()):
        warnings.append(
            f"the adapter was trained on {trained_on!r}; make sure that {str(request.model)!r} is that model"
        )
    return warnings


def _find_unserved_files(directory: Path) -> tuple[str, ...]:
    """Returns the files in the adapter's directory that serving does not use."""
    return tuple(sorted(path.name for path in directory.iterdir() if path.name not in MEMBER_NAMES))
