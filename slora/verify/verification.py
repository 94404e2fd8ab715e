"""Checks that an adapter is served as trained: compares our answers and deltas with those of transformers and peft.

The reference scores greedy answers of the whole engine, token by token. Both sides also compute what each adapted
module adds to its output for the same random inputs, which identifies a wrong module. The two sides run one after the
other, so that only one copy of the base model is in memory at a time.

A token passes if both sides chose it, or if the reference's two best tokens are almost equally probable. The project's
tests use the same rule. Differences of log-probabilities and of module outputs have limits that rounding never reaches
and that a wrong scale always exceeds.
"""

import gc
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from slora.core.errors import NotComparable
from slora.core.sampling_params import SamplingParams
from slora.llm.llm import LLM
from slora.llm.lora_adapter import LoraAdapter
from slora.llm.request_builder import Prompt, read_content
from slora.memory.device_memory import DeviceMemory
from slora.memory.residency import AdapterLoad, Resident
from slora.memory.tenant_account import TenantAccount
from slora.models.lora_deltas import LoraDeltas
from slora.models.model_spec import read_model_spec
from slora.text.answer import Completion
from slora.text.tokenizer import Tokenizer
from slora.verify.peft_reference import PeftReference
from slora_adapters.peft.adapter import Adapter, AdapterLimits
from slora_adapters.peft.extras import VOCABULARY_NAME
from slora_adapters.peft.packing import PackedAdapter, pack
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import MEMBER_NAMES
from slora_adapters.version import AdapterVersion
from slora_kernels.batch import KVGeometry, LoraTiles
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.layout import LoraSite, ModelShape
from slora_kernels.ops import Kernels


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The greatest differences that rounding can explain."""

    logprob: float  # For one token, in nats.
    delta: float  # Of a module's output, relative to its largest entry.
    margin: float  # Two tokens whose log-probabilities differ by less than this pass for each other.
    excused: float  # Share of all tokens that may differ for that reason. One may always, because few are compared.


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
    """The comparison of one module."""

    path: str  # From the model's root.
    rank: int
    scale: float
    deviation: (
        float  # Largest difference between our delta and peft's, relative to the largest entry of peft's.
    )


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """The comparison of one answer."""

    prompt: str | None
    prompt_tokens: int
    answer_tokens: int
    wrong: int  # Tokens that peft would not have chosen.
    excused: int  # Differing tokens where peft was undecided.
    logprob: float  # Mean log-probability of the answer's tokens.
    peft_logprob: float
    deviation: float  # Largest difference between our log-probability of a token and peft's.
    effect: float  # Mean KL divergence per token from the distribution of the base model, in nats.
    changed: float  # Share of tokens after which the argmax differs from that of the base model.


@dataclass(frozen=True, slots=True)
class Verification:
    """The result for one adapter."""

    dtype: str
    kernels: str
    num_modules: int
    modules: tuple[ModuleCheck, ...]
    only_here: tuple[str, ...]  # Modules that only this engine adapts.
    only_peft: tuple[str, ...]
    prompts: tuple[PromptCheck, ...]
    not_served: tuple[str, ...]  # Files in the adapter's directory that serving does not use.
    warnings: tuple[str, ...]  # Further facts for the adapter's author.
    problems: tuple[str, ...]  # Why the two sides are not equal.

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


# More than one token, and not a power of two, like a real batch.
_TOKENS = 5
_BLOCK_TOKENS = 16


def probe_inputs(shape: ModelShape, site: LoraSite, dtype: torch.dtype) -> Tensor:
    """Inputs [T, in] from a standard normal distribution, in `dtype`. For the embedding, one-hot rows of random tokens.

    The inputs depend on the site only, so they are the same in every call.
    """
    random = torch.Generator().manual_seed(site.group)
    if site == shape.embedding_site:
        token_ids = torch.randint(site.in_width, (_TOKENS,), generator=random)
        return F.one_hot(token_ids, site.in_width).to(dtype)
    return torch.randn((_TOKENS, site.in_width), generator=random).to(dtype)


@torch.inference_mode()
def probe_adapter(
    packed: PackedAdapter,
    shape: ModelShape,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    *,
    weight: float = 1.0,
) -> Iterator[tuple[int, Tensor]]:
    """Yields each adapted module with float32 [T, out]: what LoRA adds to its output for the site's `probe_inputs`.
    Of E experts, it is float32 [E * T, out].

    packed: in `dtype`, for a model of `shape`. weight: a factor on the adapter's scale.
    """
    memory = _load(packed, shape, dtype, device)
    tiles = torch.tensor([[0, 0, _TOKENS]], dtype=torch.int32, device=device)
    weights = torch.tensor([weight], dtype=torch.float32, device=device)
    lora = LoraTiles(tiles, weights, packed.layout.targets.max_group_rank, _TOKENS)
    step = kernels.prepare_lora(lora, memory.tables)
    for site in shape.sites:
        if not packed.layout.groups[site.group, 0]:
            continue
        count = site.num_experts
        out = torch.zeros((count * _TOKENS, sum(site.widths)), dtype=dtype, device=device)
        x = probe_inputs(shape, site, dtype).to(device)
        if count > 1:
            starts = torch.arange(0, (count + 1) * _TOKENS, _TOKENS, dtype=torch.int32, device=device)
            tokens = torch.arange(_TOKENS, device=device).repeat(count)
            routed = LoraDeltas([lora], memory, kernels).route(starts, tokens, _TOKENS, [site])
            routed.add(out, x.repeat(count, 1), site)
            yield site.first_module, out.float().cpu()
            continue
        if site == shape.embedding_site:
            shrunk = kernels.shrink_embedding(x.argmax(dim=1), memory.pages, site, step, dtype)
        else:
            shrunk = kernels.shrink(x, memory.pages, site, step)
        kernels.expand(out, shrunk, memory.pages, site, step)
        deltas = enumerate(torch.split(out.float().cpu(), list(site.widths), dim=1), site.first_module)
        yield from ((module, delta) for module, delta in deltas if packed.layout.modules[module, 0])


def _load(packed: PackedAdapter, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> DeviceMemory:
    """Creates pages for this adapter alone, and one slot that points to them."""
    page_bytes = shape.num_layers * shape.layer_page_bytes(_BLOCK_TOKENS)
    num_pages = -(-packed.layout.num_bytes // page_bytes)
    geometry = KVGeometry.of(shape, _BLOCK_TOKENS, dtype)
    memory = DeviceMemory(geometry, shape, page_bytes, num_pages, 1, num_pages, device)
    # The pages are in reverse order, so that a kernel that ignores the page table fails.
    pages = list(range(num_pages - 1, -1, -1))
    resident = Resident(
        AdapterVersion("", ""), TenantAccount(""), 0, 1, pages, packed.layout.num_bytes, packed.layout.targets
    )
    memory.load(AdapterLoad(resident, packed, 0, num_pages))
    return memory


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
        tokenizer_digests=_read_tokenizer_digests(request.model),
    )
    own = served or LoraAdapter(request.directory)
    adapter = read_content(own.content, shape, limits)
    if adapter.tensors.vocabulary.classifier is not None:
        raise NotComparable(
            "the adapter classifies texts, and only written answers are compared; compare /v1/classify with "
            "transformers' class for sequence classification"
        )
    if adapter.tensors.num_added:
        raise NotComparable(
            f"the adapter has {adapter.tensors.num_added} rows behind those of the base model, which is not resized "
            "here; compare answers with transformers after resize_token_embeddings"
        )
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


def _read_tokenizer_digests(model: Path) -> tuple[str, ...]:
    has_tokenizer = (model / VOCABULARY_NAME).is_file()
    return Tokenizer.from_directory(model).digests if has_tokenizer else ()


def _run_engine(
    request: VerificationRequest, served: LoraAdapter, adapter: Adapter, shape: ModelShape, dtype: str
) -> _EngineResults:
    """Computes this engine's side. The model is freed before this function returns."""
    llm = LLM(request.model, dtype=dtype, device=request.device, max_lora_rank=request.max_lora_rank)
    invocation = adapter.config.invocation
    random_prompts = _random_prompts(
        llm.info.vocab_size, llm.info.max_model_len, request.max_tokens, invocation
    )
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


def _random_prompts(
    vocab_size: int, max_len: int, max_tokens: int, invocation: Sequence[int]
) -> list[list[int]]:
    """Makes prompts of random tokens. They are sufficient: two programs that agree on them also agree on text.

    invocation: tokens that activate the adapter, which each prompt has in its middle. They may be none.
    """
    rng = random.Random(0)
    room = max(1, max_len - max_tokens - len(invocation))
    prompts = [[rng.randrange(vocab_size) for _ in range(min(length, room))] for length in _DEFAULT_LENGTHS]
    return [[*prompt[: len(prompt) // 2], *invocation, *prompt[len(prompt) // 2 :]] for prompt in prompts]


def _compare_modules(
    ours: _EngineResults, reference: PeftReference, adapter: Adapter, shape: ModelShape, dtype: torch.dtype
) -> list[ModuleCheck]:
    checks = []
    for site in shape.sites:
        for module in range(site.first_module, site.first_module + len(site.widths)):
            pair = adapter.pairs.get(module)
            if pair is not None and pair.path in reference.adapted:
                inputs = probe_inputs(shape, site, dtype)
                theirs = reference.delta(pair.path, inputs, is_transposed=pair.is_transposed)
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
