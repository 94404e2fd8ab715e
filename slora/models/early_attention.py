"""The attention of transformers' classes that compute it themselves: Bloom, Falcon, GPT-Neo, MPT and XGLM.

All other classes call an attention function that is registered by name. The modules of these get a `forward` that
projects queries, keys and values as the class does, and calls the registered function, too. The implementation `eager`
still runs the class's own code, with which the check at start compares.

Bloom and MPT add a number to each score that depends on the key's position and on the head (ALiBi,
arXiv 2108.12409). The numbers are those of the class, see `KEY_BIAS`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slora.core.errors import ConfigError

# The argument of an attention function that has float32 [heads, positions]: what is added to the scaled score of a key
# at a position. A head of the keys serves one head of the queries.
KEY_BIAS = "key_bias"
# In float32, sums of greater numbers are off by more than 2**-11.
_MOST_BIAS = 8192.0
# The columns of queries and keys that hold a key bias, see `join_bias`. Three would do, but with four, a page of 16
# tokens in 16 bits takes whole segments whatever the number of heads is.
NUM_BIAS_COLUMNS = 4
# What a query has in these columns. A greater number lets the key's columns fit into float16.
_BIAS_UNIT = 16.0
_EAGER = "eager"
# Queries, keys and values, each [1, heads, T, D], and further arguments of the attention function.
_Projected = tuple[Tensor, Tensor, Tensor, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Family:
    """project: of the module, and of the arguments of its call. finish: from the module, the heads' outputs [1, T, H]
    and these arguments. bias: the key bias of a model for its first positions.
    """

    attention: str  # The class of the attention modules.
    project: Callable[[Any, Mapping[str, Any]], _Projected]
    finish: Callable[[Any, Tensor, Mapping[str, Any]], Tensor]
    bias: Callable[[Any, int, torch.dtype], Tensor | None] = lambda _, __, ___: None
    # From the config and a module: the tokens that a token sees, itself included.
    window: Callable[[Any, Any], int | None] = lambda _, __: None


def is_early(config: PreTrainedConfig) -> bool:
    return config.model_type in _FAMILIES


def is_early_linear(module: object) -> bool:
    """Whether a module is Falcon's class of linears, without bias. With one, it rounds the product before the sum."""
    return type(module).__name__ == "FalconLinear" and getattr(module, "bias", None) is None


def find_first_implementation(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """The attention implementation with which a model is built that shall use `name`.

    The parts that read images keep their own, because some of them know no other.
    """
    text = config.get_text_config()
    part = next((key for key, value in vars(config).items() if value is text), None)
    if is_early(config):
        return _EAGER
    return name if part is None else {"": name, part: name}


def set_attention(model: PreTrainedModel, name: str) -> None:
    if is_early(model.config):
        model.config._attn_implementation = name
    else:
        model.set_attn_implementation(name)


def has_key_bias(model: PreTrainedModel) -> bool:
    return is_early(model.config) and _make_bias(model, 1) is not None


def install_attention(model: PreTrainedModel, name: str, max_positions: int) -> None:
    """Makes the attention modules of an early class call the registered function `name`. Others do already.

    Raises ConfigError for a bias that float32 can't add exactly enough.
    """
    if not is_early(model.config):
        return
    if getattr(model.config, "alibi", False):
        raise ConfigError(
            f"model_type {model.config.model_type!r} with alibi: transformers adds the bias twice with one of its "
            "attention functions and once with another; only models with rotary embedding are served"
        )
    family, bias = _FAMILIES[model.config.model_type], _make_bias(model, max_positions)
    if bias is not None and bias.abs().max() > _MOST_BIAS:
        raise ConfigError(
            f"model_type {model.config.model_type!r}: the linear bias of scores reaches {bias.abs().max():.3g} at "
            f"{max_positions} positions; at most {_MOST_BIAS:g} is served, so lower their number in config.json"
        )
    on_device: dict[torch.device, Tensor] = {}

    def find_options(window: int | None, device: torch.device) -> dict[str, Any]:
        if bias is not None and device not in on_device:
            on_device[device] = bias.to(device)
        return {KEY_BIAS: on_device.get(device), "sliding_window": window}

    for module in model.modules():
        if type(module).__name__ == family.attention:
            options = partial(find_options, family.window(model.config, module))
            module.forward = partial(_call, model.config, family, module, module.forward, options)
    if model.config.model_type == "mpt":
        model.get_decoder().register_forward_pre_hook(_give_mask, with_kwargs=True)
    set_attention(model, name)


def join_bias(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns queries and keys whose products contain the bias of each key.

    query, key: [1, heads, T, D] -> [1, heads, T, D + 4]. bias: float32 [heads, T], added to products times `scale`.

    A key holds the bias as a sum of four numbers. In bfloat16, three of them have the 24 bits of float32 together. So
    the bias is exact in every dtype, if the pages hold keys as they are.
    """
    left, columns = bias / (scale * _BIAS_UNIT), []
    for _ in range(NUM_BIAS_COLUMNS):
        columns.append(left.to(key.dtype))
        left = left - columns[-1].float()
    units = query.new_full((*query.shape[:3], NUM_BIAS_COLUMNS), _BIAS_UNIT)
    return torch.cat((query, units), dim=3), torch.cat((key, torch.stack(columns, dim=-1)[None]), dim=3)


def _call(
    config: PreTrainedConfig,
    family: _Family,
    module: Any,
    own: Callable[..., Any],
    find_options: Callable[[torch.device], dict[str, Any]],
    *args: Any,
    **options: Any,
) -> Any:
    name = config._attn_implementation
    if name == _EAGER:
        return own(*args, **options)
    given = inspect.signature(own).bind(*args, **options).arguments
    query, key, value, others = family.project(module, given)
    others = {"scaling": query.shape[3] ** -0.5, **find_options(query.device), **others}
    attend = ALL_ATTENTION_FUNCTIONS[name]
    out, _ = attend(module, query, key, value, None, **others)
    return family.finish(module, out.flatten(2), given), None


def _make_bias(model: PreTrainedModel, num_positions: int) -> Tensor | None:
    bias = _FAMILIES[model.config.model_type].bias(model, num_positions, model.dtype)
    return None if bias is None else bias.view(-1, num_positions).float()


def _give_mask(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """MPT's class converts the mask, which other implementations do not have. It keeps a mask with four axes."""
    if model.config._attn_implementation == _EAGER:
        return None
    return args, {**options, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}


def _split_heads(x: Tensor, width: int) -> Tensor:
    """[1, T, H] -> [1, heads, T, width]"""
    return x.view(*x.shape[:2], -1, width).transpose(1, 2)


def _project_bloom(module: Any, given: Mapping[str, Any]) -> _Projected:
    fused = module.query_key_value(given["hidden_states"]).unflatten(
        -1, (module.num_heads, 3, module.head_dim)
    )
    query, key, value = fused.permute(3, 0, 2, 1, 4)
    return query, key, value, {}


def _finish_bloom(module: Any, out: Tensor, given: Mapping[str, Any]) -> Tensor:
    x: Tensor = module.dense(out) + given["residual"]
    return x


def _bias_bloom(model: Any, num_positions: int, dtype: torch.dtype) -> Tensor:
    ones = torch.ones(1, num_positions, device="cpu")
    bias: Tensor = model.transformer.build_alibi_tensor(ones, model.config.n_head, dtype)
    return bias


def _project_falcon(module: Any, given: Mapping[str, Any]) -> _Projected:
    count = module.num_kv_heads
    if not module.new_decoder_architecture:
        count = 1 if module.multi_query else module.num_heads
    fused = module.query_key_value(given["hidden_states"])
    fused = fused.unflatten(-1, (count, module.num_heads // count + 2, module.head_dim))
    query, key, value = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    cosines, sines = (part[:, None] for part in given["position_embeddings"])
    return _rotate(query, cosines, sines), _rotate(key, cosines, sines), value, {}


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


def _project_gpt_neo(module: Any, given: Mapping[str, Any]) -> _Projected:
    hidden = given["hidden_states"]
    query, key, value = (
        _split_heads(linear(hidden), module.head_dim)
        for linear in (module.q_proj, module.k_proj, module.v_proj)
    )
    return query, key, value, {"scaling": 1.0}


def _find_window(config: Any, module: Any) -> int | None:
    return int(config.window_size) if module.attention_type == "local" else None


def _project_mpt(module: Any, given: Mapping[str, Any]) -> _Projected:
    fused = module.Wqkv(given["hidden_states"])
    if module.clip_qkv:
        fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (_split_heads(part, module.head_dim) for part in fused.chunk(3, dim=2))
    return query, key, value, {"scaling": module.softmax_scale}


def _bias_mpt(model: Any, num_positions: int, _: torch.dtype) -> Tensor:
    # The class counts positions from the last one. A number that all keys have in common changes no weight.
    bias: Tensor = model.transformer.build_mpt_alibi_tensor(model.config.n_heads, num_positions, device="cpu")
    return bias - bias[..., :1]


def _project_xglm(module: Any, given: Mapping[str, Any]) -> _Projected:
    hidden = given["hidden_states"]
    query, key, value = (
        _split_heads(linear(hidden), module.head_dim)
        for linear in (module.q_proj, module.k_proj, module.v_proj)
    )
    return query, key, value, {}


def _project_out(module: Any, out: Tensor, _: Mapping[str, Any]) -> Tensor:
    x: Tensor = module.out_proj(out)
    return x


_FAMILIES: Mapping[str, _Family] = {
    "bloom": _Family("BloomAttention", _project_bloom, _finish_bloom, _bias_bloom),
    "falcon": _Family("FalconAttention", _project_falcon, lambda module, out, _: module.dense(out)),
    "gpt_neo": _Family("GPTNeoSelfAttention", _project_gpt_neo, _project_out, window=_find_window),
    "mpt": _Family("MptAttention", _project_mpt, _project_out, _bias_mpt),
    "xglm": _Family("XGLMAttention", _project_xglm, _project_out),
}
