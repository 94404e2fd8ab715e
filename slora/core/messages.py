"""Converts the messages between API and engine to plain maps, and back. Both ends use this module.

The field `op` names the kind of message:

API to engine:  add, abort, remove_adapter, purge (of a tenant), pins (replaces all earlier pins), prewarm, stats,
                observe (for consoles), recorded (requests whose usage is durable), served (what another engine has
                charged to tenants)
engine to API:  hello (EngineInfo, once), status, report (EngineReport, about ten times a second), begun (requests that
                have joined the batch), outputs (one frame per step), usage (of ended requests, before their last
                outputs), stats, place (the reply to prewarm), purged (the reply to purge), live (the reply to observe)
"""

from collections.abc import Iterable
from dataclasses import asdict, astuple, fields
from typing import Any

from slora.core.cost_model import CostModel
from slora.core.engine_state import (
    AdapterWork,
    EngineInfo,
    EngineReport,
    EngineStats,
    HistogramCounts,
    LiveState,
    LoadPaces,
    PageCounts,
    PageMap,
    PageOwner,
    Pin,
    PoolEvent,
    Quantiles,
    ServedCounts,
    ServiceSpan,
    TenantPurge,
    TenantState,
)
from slora.core.errors import (
    AdapterFetchFailed,
    ContextTooLong,
    DeadlineMissed,
    EngineUnavailable,
    RequestFailed,
    RequestRefused,
    StepFailed,
)
from slora.core.request import (
    EmittedTokens,
    EndedRequest,
    EngineRequest,
    FinishReason,
    Pooling,
    RequestTiming,
    RequestUsage,
    StepOutput,
    TenantShare,
    TokenDelta,
    TokenLogprobs,
    WeightedAdapter,
)
from slora.core.sampling_params import OutputKind, SamplingParams, StructuredOutput
from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import ModelShape

PROTOCOL_VERSION = 25

Message = dict[str, Any]

_KINDS: dict[type[Exception], str] = {DeadlineMissed: "deadline", StepFailed: "step", RequestFailed: "failed"}


def encode_add(request: EngineRequest) -> Message:
    sampling, output = request.sampling, request.sampling.structured_output
    return {
        "op": "add",
        "id": request.request_id,
        "tenant": request.tenant,
        "share": astuple(request.share),
        "priority": request.priority,
        "deadline_s": request.deadline_s,
        "account": request.account,
        "is_background": request.is_background,
        "prompt": request.prompt_token_ids,
        "adapters": [(*encode_version(version), weight) for version, weight in request.adapters],
        "sampling": {field.name: getattr(sampling, field.name) for field in fields(sampling)}
        # Maps of the wire format have string keys only, so logit_bias travels as a list of pairs.
        | {"logit_bias": list(sampling.logit_bias.items())}
        | {"structured_output": output if output is None else astuple(output)},
        "pooling": None if request.pooling is None else astuple(request.pooling),
        "emitted": request.emitted,
    }


def decode_add(message: Message) -> EngineRequest:
    sampling = dict(message["sampling"])
    sampling["stop"] = tuple(sampling["stop"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    sampling["logit_bias"] = dict(sampling["logit_bias"])
    if sampling["allowed_token_ids"] is not None:
        sampling["allowed_token_ids"] = tuple(sampling["allowed_token_ids"])
    sampling["logprob_token_ids"] = tuple(sampling["logprob_token_ids"])
    sampling["bad_words"] = tuple(map(tuple, sampling["bad_words"]))
    output = sampling["structured_output"]
    sampling["structured_output"] = output if output is None else _decode_form(output)
    pooling, emitted = message["pooling"], message["emitted"]
    return EngineRequest(
        request_id=message["id"],
        tenant=message["tenant"],
        prompt_token_ids=message["prompt"],
        adapters=tuple(
            WeightedAdapter(AdapterVersion(tenant, digest), weight)
            for tenant, digest, weight in message["adapters"]
        ),
        sampling=SamplingParams(**sampling),
        share=TenantShare(*message["share"]),
        priority=message["priority"],
        deadline_s=message["deadline_s"],
        account=message["account"],
        is_background=message["is_background"],
        pooling=None if pooling is None else Pooling(*pooling),
        emitted=None if emitted is None else _decode_emitted(*emitted),
    )


def _decode_emitted(choices: list[list[int] | None], num_tokens: int, num_cached: int) -> EmittedTokens:
    return EmittedTokens(
        tuple(None if tokens is None else tuple(tokens) for tokens in choices), num_tokens, num_cached
    )


def _decode_form(row: list[str]) -> StructuredOutput:
    kind, text, param = row
    return StructuredOutput(OutputKind(kind), text, param)


def encode_version(version: AdapterVersion) -> list[str]:
    return [version.tenant, version.digest]


def decode_version(pair: list[str]) -> AdapterVersion:
    return AdapterVersion(*pair)


def encode_pins(pins: Iterable[Pin]) -> Message:
    return {"op": "pins", "pins": [[encode_version(pin.version), astuple(pin.share)] for pin in pins]}


def decode_pins(message: Message) -> list[Pin]:
    return [Pin(decode_version(version), TenantShare(*share)) for version, share in message["pins"]]


def encode_prewarm(version: AdapterVersion, share: TenantShare) -> Message:
    return {"op": "prewarm", "version": encode_version(version), "share": astuple(share)}


def decode_prewarm(message: Message) -> tuple[AdapterVersion, TenantShare]:
    return decode_version(message["version"]), TenantShare(*message["share"])


def encode_info(info: EngineInfo) -> Message:
    return {"op": "hello", "protocol": PROTOCOL_VERSION, "info": asdict(info)}


def decode_info(message: Message) -> EngineInfo:
    """Decodes the hello. Raises EngineUnavailable if the engine uses another version of the protocol."""
    if message.get("protocol") != PROTOCOL_VERSION:
        raise EngineUnavailable(
            f"the engine has protocol version {message.get('protocol')}, but this process has "
            f"{PROTOCOL_VERSION}: restart both from the same installation"
        )
    info = dict(message["info"])
    info["shape"] = ModelShape.from_plain(info["shape"])
    info["eos_token_ids"] = tuple(info["eos_token_ids"])
    return EngineInfo(**info)


def encode_report(report: EngineReport, last: EngineReport, engine: str) -> Message:
    """Encodes the changes since the report `last`. engine: identifies this start of the engine.

    The caller adds `num_taken`, which differs between the API processes.
    """
    return {
        "op": "report",
        "engine": engine,
        "backlog": report.backlog,
        "resident": _encode_changes(report.resident, last.resident),
        "on_host": _encode_changes(report.on_host, last.on_host),
        "spans": report.spans,
    }


def _encode_changes(
    versions: frozenset[AdapterVersion], last: frozenset[AdapterVersion]
) -> tuple[list[list[str]], list[list[str]]]:
    if versions is last:
        return [], []
    return [*map(encode_version, versions - last)], [*map(encode_version, last - versions)]


def encode_served(engine: str, spans: list[Any]) -> Message:
    """Encodes what an engine has charged, for another engine. spans: as the message `report` has them."""
    return {"op": "served", "engine": engine, "spans": spans}


def decode_served(message: Message) -> tuple[str, list[ServiceSpan]]:
    return message["engine"], [ServiceSpan(*row) for row in message["spans"]]


def encode_purged(purge: TenantPurge, number: int) -> Message:
    return {"op": "purged", "number": number, "purge": asdict(purge)}


def decode_purged(message: Message) -> TenantPurge:
    return TenantPurge(**message["purge"])


def encode_stats(stats: EngineStats, number: int) -> Message:
    return {"op": "stats", "number": number, "stats": asdict(stats)}


def decode_stats(message: Message) -> EngineStats:
    stats = dict(message["stats"])
    for name in ("loaded_adapters", "waiting_adapters"):
        stats[name] = tuple((tenant, digest) for tenant, digest in stats[name])
    for name in ("step_seconds", "step_tokens", "token_gaps"):
        bounds, counts, total = stats[name].values()
        stats[name] = HistogramCounts(tuple(bounds), tuple(counts), total)
    for name in ("tenants", "adapters"):
        stats[name] = {one: ServedCounts(**counts) for one, counts in stats[name].items()}
    stats["pooled_adapters"] = tuple(stats["pooled_adapters"])
    stats["pages"] = PageCounts(**stats["pages"])
    stats["tenant_pages"] = {name: PageCounts(**counts) for name, counts in stats["tenant_pages"].items()}
    stats["load_paces"] = LoadPaces(**stats["load_paces"])
    stats["costs"] = CostModel(**stats["costs"])
    stats["usage"] = RequestUsage(**stats["usage"])
    cache = stats["host_cache"]
    stats["host_cache"] = CacheCounts(**{**cache, "labels": tuple(cache["labels"])})
    return EngineStats(**stats)


def encode_live_state(state: LiveState, number: int) -> Message:
    # Not `asdict`: it would copy thousands of owners, which takes milliseconds.
    fields = {name: getattr(state, name) for name in LiveState.__slots__ if name != "engines"}
    pages = state.page_map
    fields["page_map"] = [pages.stride, pages.cells, pages.owners]
    fields["pages"], fields["total"] = astuple(state.pages), astuple(state.total)
    fields["tenants"] = {name: astuple(one) for name, one in state.tenants.items()}
    return {"op": "live", "number": number, "state": fields}


def decode_live_state(message: Message) -> LiveState:
    fields = dict(message["state"])
    stride, cells, owners = fields["page_map"]
    fields["page_map"] = PageMap(stride, cells, tuple(PageOwner(*one) for one in owners))
    fields["pages"], fields["total"] = PageCounts(*fields["pages"]), _decode_tenant_state(fields["total"])
    fields["tenants"] = {name: _decode_tenant_state(one) for name, one in fields["tenants"].items()}
    fields["adapters"] = tuple(AdapterWork(*one) for one in fields["adapters"])
    fields["events"] = tuple(PoolEvent(*one) for one in fields["events"])
    fields["step"] = _decode_quantiles(fields["step"])
    return LiveState(**fields)


def _decode_tenant_state(row: list[Any]) -> TenantState:
    pages, running, waiting, tokens_per_s, first_token, interval = row
    return TenantState(
        PageCounts(*pages),
        running,
        waiting,
        tokens_per_s,
        _decode_quantiles(first_token),
        _decode_quantiles(interval),
    )


def _decode_quantiles(row: list[Any] | None) -> Quantiles | None:
    return None if row is None else Quantiles(*row)


def encode_usage(ended: Iterable[EndedRequest]) -> Message:
    rows = [
        (request_id, astuple(usage), None if timing is None else astuple(timing))
        for request_id, usage, timing in ended
    ]
    return {"op": "usage", "ended": rows}


def decode_usage(message: Message) -> list[EndedRequest]:
    return [
        EndedRequest(request_id, RequestUsage(*usage), None if timing is None else RequestTiming(*timing))
        for request_id, usage, timing in message["ended"]
    ]


def encode_output(output: StepOutput) -> list[Any]:
    """Encodes one output as a list: [request id, token ids, finish reason, logprobs, error, choice index, prompt
    logprobs, number of prompt tokens found in the prefix cache, embedding].

    A list is shorter than a map, and every step sends one for each sequence.
    """
    delta, error = output.delta, output.error
    return [
        output.request_id,
        delta.token_ids if delta else (),
        delta.finish_reason if delta else None,
        _encode_logprobs(delta.logprobs) if delta else None,
        _encode_error(error) if error is not None else None,
        delta.index if delta else 0,
        _encode_logprobs(delta.prompt_logprobs) if delta else None,
        delta.num_cached if delta else 0,
        delta.embedding if delta else None,
    ]


def decode_output(row: list[Any]) -> StepOutput:
    request_id, token_ids, reason, logprobs, error, index, scored, num_cached, embedding = row
    if error is not None:
        return StepOutput(request_id, error=_decode_error(error))
    entries = tuple(entry for entry in _decode_logprobs(logprobs) if entry is not None) if logprobs else None
    prompt_entries = _decode_logprobs(scored) if scored else ()
    finish = FinishReason(reason) if reason is not None else None
    delta = TokenDelta(tuple(token_ids), finish, entries, index, prompt_entries, num_cached, embedding)
    return StepOutput(request_id, delta)


def _encode_logprobs(entries: Iterable[TokenLogprobs | None] | None) -> list[Any] | None:
    if not entries:
        return None
    return [None if entry is None else (entry.logprob, entry.top) for entry in entries]


def _decode_logprobs(rows: list[Any]) -> tuple[TokenLogprobs | None, ...]:
    return tuple(
        None if row is None else TokenLogprobs(row[0], tuple((token, logprob) for token, logprob in row[1]))
        for row in rows
    )


def _encode_error(error: Exception) -> Message:
    if isinstance(error, RequestRefused):
        return {
            "kind": "too_long" if isinstance(error, ContextTooLong) else "refused",
            "message": error.message,
            "param": error.param,
            "code": error.code,
        }
    if isinstance(error, AdapterFetchFailed):
        return {"kind": "fetch", "message": error.message, "code": error.code}
    return {"kind": _KINDS.get(type(error), "failed"), "message": str(error)}


def _decode_error(fields: Message) -> Exception:
    kind, message = fields["kind"], fields["message"]
    if kind == "too_long":
        return ContextTooLong(message, fields["param"])
    if kind == "refused":
        return RequestRefused(message, fields["param"], fields["code"])
    if kind == "fetch":
        return AdapterFetchFailed(message, fields["code"])
    return next((error for error, name in _KINDS.items() if name == kind), RequestFailed)(message)
