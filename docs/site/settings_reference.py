"""The page of all settings, from their declarations in `EngineConfig`, `Settings` and `ClusterSettings`."""

from slora.core.engine_config import EngineConfig
from slora.core.setting import SettingSpec, setting_specs
from slora_api.core.settings import ClusterSettings, Settings

_INTRODUCTION = """\
# Settings

Each setting of `slora serve`, `slora demo` and `slora doctor` is a flag and an environment variable:
`--max-model-len` is `SLORA_MAX_MODEL_LEN`. A flag overrides the variable, which overrides the default. `slora deploy`
and `slora cluster serve` have the settings of a cluster in addition. The tables are made from the declarations that
the server reads.
"""
_GROUPS = {
    "Which settings has the engine?": EngineConfig,
    "Which settings has the server?": Settings,
    "Which settings has a cluster?": ClusterSettings,
}


def make_page() -> str:
    parts = [_INTRODUCTION]
    for heading, owner in _GROUPS.items():
        parts.append(f"## {heading}\n\n| setting | default | value | meaning |\n|---|---|---|---|")
        parts.extend(_make_row(spec) for spec in setting_specs(owner))
        parts.append("")
    return "\n".join(parts)


def _make_row(spec: SettingSpec) -> str:
    default = f"`{spec.default_text}`" if spec.default_text else ""
    name = f"`{spec.flag}`{{ #{spec.flag.strip('-')} }}"
    return f"| {name} | {default} | {spec.kind.accepted} | {_capitalize(spec.help_text)} |"


def _capitalize(text: str) -> str:
    text = (text[0].upper() + text[1:]).replace("|", "\\|").replace("*", "\\*").replace("%%", "%")
    return text if text.endswith((".", ")")) else text + "."
