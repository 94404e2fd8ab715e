"""`slora adapter`: manages a tenant's adapters, and the operator's pins.

A push streams the files without loading them into memory. A push from the Hugging Face hub first downloads to this
machine, with this machine's token. With `--by-server`, the server downloads instead.

`slora adapter convert`: makes plain LoRA of an adapter whose initialisation changed the base model.

`slora adapter versions`, `alias` and `rollback`: manage the versions that a name and its aliases serve.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from slora.core.errors import ConfigError
from slora.models.model_spec import find_model
from slora.models.weights.checkpoint import fingerprint
from slora_adapters.errors import AdapterError, AdapterInvalid
from slora_adapters.peft.conversion import convert_adapter
from slora_adapters.peft.extras import EXTRA_FIELDS
from slora_adapters.peft.hub_reference import HubReference
from slora_adapters.peft.peft_directory import is_harmless
from slora_adapters.process.progress_bar import count_reads, show_progress
from slora_adapters.registry.record import suggest_adapter_name
from slora_api.cli.declaration import JSON, argument, command, read_positive, run_later
from slora_api.cli.output import print_json, print_records
from slora_api.cli.remote import (
    CommandFailed,
    admin_client,
    check,
    error_code,
    explained,
    tenant_client,
    walk,
)

if TYPE_CHECKING:
    from slora_adapters.peft.hub import HubSnapshot

# Multipart field -> the name of the file that peft and transformers write.
_REQUIRED = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
_PICKLE = "adapter_model.bin"
_ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")


def _find_files(source: Path) -> dict[str, Path]:
    """Returns multipart field -> file to upload. These are the files of a directory, or one archive, which the server
    unpacks.
    """
    return {"archive": source} if source.is_file() else _find_members(source)


def _find_members(directory: Path) -> dict[str, Path]:
    missing = [name for name in _REQUIRED.values() if not (directory / name).is_file()]
    if missing == ["adapter_model.safetensors"] and (directory / _PICKLE).is_file():
        raise CommandFailed(
            f"{directory} has its weights in {_PICKLE}, a pickle, which is never loaded; save the adapter with "
            "save_pretrained(directory, safe_serialization=True)"
        )
    if missing:
        raise CommandFailed(
            f"{directory} has no {' and no '.join(missing)}; give the directory of a PEFT adapter, or "
            "an archive of it"
        )
    found = {field: directory / name for field, name in {**_REQUIRED, **EXTRA_FIELDS}.items()}
    left_out = [
        path.name
        for path in sorted(directory.iterdir())
        if path.is_file() and path not in found.values() and not is_harmless([path.name])
    ]
    if left_out:
        print(f"Not sent, because adapters have no such files: {', '.join(left_out)}", file=sys.stderr)
    return {field: path for field, path in found.items() if path.is_file()}


def _download(text: str) -> "HubSnapshot | None":
    """Downloads the adapter that an hf:// reference names. Returns None for a local path."""
    try:
        reference = HubReference.parse(text)
        if reference is None:
            return None
        snapshot: HubSnapshot = importlib.import_module("slora_adapters.peft.hub").download(reference)
        return snapshot
    except (AdapterError, ValueError) as error:
        raise CommandFailed(str(error)) from error


def _parse_hub(text: str) -> HubReference:
    try:
        reference = HubReference.parse(text)
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    if reference is None:
        raise CommandFailed(f"--by-server needs hf://ORG/REPO[@REVISION][/FOLDER], not {text!r}")
    return reference


_COLUMNS = {
    "ADAPTER": lambda adapter: adapter["name"],
    "VERSION": lambda adapter: str(adapter["version"]),
    "RANK": lambda adapter: str(adapter["rank"]),
    "BYTES": lambda adapter: str(adapter["bytes"]),
    "MODULES": lambda adapter: ",".join(adapter["target_modules"]),
    "PINNED": lambda adapter: "yes" if adapter["pinned"] else "no",
    "DIGEST": lambda adapter: adapter["digest"],
}


def describe_push(pushed: dict[str, Any]) -> str:
    """Returns a text about the pushed version, its certificate, and how to call the adapter."""
    found, change = pushed["certificate"], pushed["certificate"]["logprob_change"]
    state = "new version" if pushed["new_version"] else "already the newest version"
    ranks = {summary[end] for summary in found["modules"].values() for end in ("min_rank", "max_rank")}
    lowest, highest = min(ranks), max(ranks)
    rank = str(lowest) if lowest == highest else f"{lowest} to {highest}"
    trial = "" if change is None else f"; changes log-probabilities by up to {change:.3g}"
    loads = (f"{tier} {ms:.0f} ms" for tier, ms in found["predicted_load_ms"].items() if ms is not None)
    lines = [
        f"{pushed['name']}@{pushed['version']}  {state}",
        f"  modules      {found['modules_adapted']} of {found['modules_total']}: {', '.join(found['modules'])}",
        f"  rank         {rank}; {pushed['bytes']} bytes, {found['pool_bytes']} in the pool",
        f"  base model   {found['base']}{trial}",
        f"  digest       {pushed['digest']}",
    ]
    if found["uses"]:
        lines.append(f"  uses         {'; '.join(found['uses'])}")
    if predicted := ", ".join(loads):
        lines.insert(4, f"  cold load    {predicted}")
    call = "Call it"
    if any(use.startswith("a head for ") for use in found["uses"]):
        scores = "a head for 1 label" in found["uses"]
        call = "Call /v1/score, /v1/rerank or /v1/classify" if scores else "Call /v1/classify"
    return "\n".join([*lines, f"{call} with model={json.dumps(pushed['name'])}."])


def _default_name(source: Path) -> str:
    """Returns the name of the directory, or of the archive without its suffix."""
    name = source.resolve().name
    suffix = next((suffix for suffix in _ARCHIVE_SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix) if source.is_file() else name


def _derive_name(text: str) -> str:
    """Returns a valid adapter name that looks like the text, and says so if it is another one."""
    name = suggest_adapter_name(text)
    if name is None:
        raise CommandFailed(f"{text!r} cannot be made an adapter name; choose one with --name")
    if name != text:
        print(f"The adapter is named {name}, because {text!r} is not a valid name (--name).", file=sys.stderr)
    return name


def _fingerprint(directory: Path) -> str:
    try:
        return fingerprint(find_model(directory, tell=lambda text: print(text, file=sys.stderr)))
    except ConfigError as error:
        raise CommandFailed(str(error)) from None


@command(
    "adapter verify",
    "compare the answers of slora with those of peft for an adapter; needs no server",
    argument("directory", help="holds adapter_config.json and adapter_model.safetensors"),
    argument(
        "--model",
        metavar="MODEL",
        required=True,
        help="the base model: its directory, or ORG/NAME of the hub",
    ),
    argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="prompt to compare; can be given several times (default: random tokens)",
    ),
    argument(
        "--max-tokens",
        type=read_positive,
        default=16,
        metavar="N",
        help="largest number of tokens of each answer (default 16)",
    ),
    argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="dtype of both sides (default float32, where a difference is more than rounding)",
    ),
    argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto"),
    argument(
        "--max-lora-rank",
        type=read_positive,
        default=128,
        metavar="N",
        help="largest rank that the server accepts (default 128)",
    ),
    JSON,
    epilog="The exit code is 0 if they are equal, 1 if they differ, and 2 if the adapter cannot be served.",
)
def verify(arguments: argparse.Namespace) -> int:
    """The module is imported only now, because it computes a model with torch and peft."""
    return run_later("slora_api.adapters.verify_command", "verify", arguments, "adapter verify", "verify")


@command(
    "adapter convert",
    "convert an adapter of PiSSA, OLoRA or CorDA to plain LoRA of twice the rank, which can be served",
    argument("directory", help="the trained adapter: adapter_config.json and adapter_model.safetensors"),
    argument(
        "--initial",
        metavar="DIR",
        required=True,
        help="the same adapter as it was before training: save_pretrained(DIR) after get_peft_model",
    ),
    argument("--output", metavar="DIR", required=True, help="a new directory for the converted adapter"),
    epilog="The exit code is 0, or 2 if the adapter cannot be converted.",
)
def convert(arguments: argparse.Namespace) -> int:
    output = Path(arguments.output)
    try:
        found = convert_adapter(Path(arguments.directory), Path(arguments.initial), output)
    except FileExistsError:
        raise CommandFailed(f"{output} exists; give a new directory with --output") from None
    except AdapterInvalid as error:
        print("cannot be converted:", *(f"  {one.code}: {one.message}" for one in error.reasons), sep="\n")
        return 2
    except AdapterError as error:
        raise CommandFailed(str(error)) from None
    print(
        f"{output}  plain LoRA of rank {found.rank} in {found.num_modules} modules\n"
        f"  largest error {found.deviation:.1e} of the delta's largest output, from rounding to float32\n"
        f"  the initial factors are up to {found.cancellation:.3g} times as large as the delta"
    )
    return 0


@command(
    "adapter push",
    "upload an adapter as the next version of a name; requests can use it at once",
    argument(
        "source",
        help="where adapter_config.json and adapter_model.safetensors are: a directory; a .zip, .tar or "
        ".tar.gz of a directory; or hf://ORG/REPO[@REVISION][/FOLDER], which is downloaded to this "
        "machine first",
    ),
    argument("--name", help="name of the adapter (default: the name of the source)"),
    argument("--tenant", metavar="T", help="push it as an adapter of this tenant, with an operator's key"),
    argument(
        "--by-server",
        action="store_true",
        help="let the server download hf://... itself, which needs a key with the scope adapters:hub, or an operator's",
    ),
    argument(
        "--base",
        metavar="MODEL",
        help="the base model that the adapter was trained on, its directory or ORG/NAME of the hub; the server refuses "
        "the upload if it serves another",
    ),
    has_json=True,
)
@explained
def push(arguments: argparse.Namespace) -> None:
    if arguments.name == "":
        raise CommandFailed("--name is empty; give a name, or omit it to use that of the source")
    fields = {"base_fingerprint": _fingerprint(Path(arguments.base))} if arguments.base else {}
    snapshot, paths = None, dict[str, Path]()
    if arguments.by_server:
        reference = _parse_hub(arguments.source)
        fields["name"] = arguments.name or _derive_name(reference.name)
        fields["source"] = str(reference)
    else:
        snapshot = _download(arguments.source)
        source = snapshot.directory if snapshot else Path(arguments.source)
        paths = _find_files(source)
        fields["name"] = arguments.name or _derive_name(
            snapshot.reference.name if snapshot else _default_name(source)
        )
    with admin_client() if arguments.tenant else tenant_client() as client, ExitStack() as stack:
        total = sum(path.stat().st_size for path in paths.values())
        advance = stack.enter_context(show_progress("Uploading", total))
        files = {
            field: (path.name, count_reads(stack.enter_context(path.open("rb")), advance))
            for field, path in paths.items()
        }
        # A form without a file is multipart only if a field says so.
        form = {name: (None, text) for name, text in fields.items()}
        route = (
            f"/admin/tenants/{quote(arguments.tenant, safe='')}/adapters"
            if arguments.tenant
            else "/v1/adapters"
        )
        pushed = check(client.post(route, files={**form, **files}))
    if snapshot:
        pushed["source"] = str(snapshot.reference)
    if arguments.json:
        print_json(pushed)
        return
    print(describe_push(pushed))
    if pushed["source"] is not None:
        print(f"The adapter was downloaded from {pushed['source']}.")


@command("adapter list", "list your adapters with the version that each name serves", has_json=True)
@explained
def show(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        print_records(walk(client, "/v1/adapters"), _COLUMNS, as_json=arguments.json)


@command(
    "adapter rm",
    "remove a version, or an adapter with all of its versions",
    argument("name", metavar="NAME[@N]"),
    argument("--force", action="store_true", help="remove it even if aliases point at it"),
)
@explained
def remove(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        params = {"force": "true"} if arguments.force else {}
        answer = client.delete(f"/v1/adapters/{quote(arguments.name, safe='')}", params=params)
        if error_code(answer) == "adapter_in_use":
            raise CommandFailed(
                f"{arguments.name} was not removed, because aliases point at it; move them (slora "
                "adapter alias), or use --force"
            )
        check(answer)
    print(f"removed {arguments.name}")


def _read_targets(words: Sequence[str]) -> dict[str, int]:
    """Parses the targets of an alias: `3` is version 3 for all requests, `3=90 4=10` splits the requests. The server
    checks the sum.
    """
    targets: dict[str, int] = {}
    for word in words:
        number, equals, weight = word.partition("=")
        if not number.isdecimal() or (equals and not weight.isdecimal()) or number in targets:
            raise CommandFailed(
                f"the target {word!r} is not valid: write VERSION=PERCENT, such as 4=10, and each version only once"
            )
        if not equals and len(words) > 1:
            raise CommandFailed(
                f"{word!r} has no percentage; several versions each need one, such as {word}=10"
            )
        targets[number] = int(weight) if equals else 100
    return targets


def _path(arguments: argparse.Namespace) -> str:
    name, at, alias = arguments.name.partition("@")
    if at:
        raise CommandFailed(
            f"the name is {arguments.name!r}; give the name and the alias as two words: {name} {alias}"
        )
    return f"/v1/adapters/{quote(arguments.name, safe='')}/aliases/{quote(arguments.alias, safe='')}"


def _print_alias(alias: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(alias)
        return
    targets = "  ".join(f"{number}={weight}" for number, weight in alias["versions"].items())
    line = f"{alias['name']}@{alias['alias']}  {targets}"
    print(line + "  follows pushes" if alias["follows_pushes"] else line)


_VERSION_COLUMNS = {
    "VERSION": lambda version: f"{version['name']}@{version['version']}",
    "RANK": lambda version: str(version["rank"]),
    "BYTES": lambda version: str(version["bytes"]),
    "ALIASES": lambda version: " ".join(
        f"{alias}={percent}" for alias, percent in version["aliases"].items()
    ),
    "DIGEST": lambda version: version["digest"],
}


@command("adapter versions", "list the versions of an adapter, newest first", argument("name"), has_json=True)
@explained
def versions(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        found = walk(client, f"/v1/adapters/{quote(arguments.name, safe='')}/versions")
        print_records(found, _VERSION_COLUMNS, as_json=arguments.json)


@command(
    "adapter alias",
    "point an alias of an adapter at a version, or split its requests between versions; without versions, show it",
    argument("name"),
    argument("alias"),
    argument("versions", nargs="*", metavar="VERSION[=PERCENT]", help="3, or 3=90 4=10"),
    argument(
        "--expect",
        nargs="*",
        metavar="VERSION[=PERCENT]",
        help="change the alias only if it points at these versions now (none: only if it does not exist)",
    ),
    argument("--follow", action="store_true", help="each later push moves the alias to the new version"),
    argument("--delete", action="store_true", help="delete the alias, but not its versions"),
    epilog="`latest` is the alias that the bare name serves. Each push moves it, unless it was set without --follow.",
    has_json=True,
)
@explained
def move(arguments: argparse.Namespace) -> None:
    """Moves or deletes an alias. Shows the alias if the user gives neither versions nor `--delete`."""
    is_move = bool(arguments.versions)
    if not is_move and (arguments.expect is not None or arguments.follow):
        raise CommandFailed("--expect and --follow apply to moving an alias; give the VERSION to move it to")
    if is_move and arguments.delete:
        raise CommandFailed("--delete deletes the alias; omit the versions")
    body: dict[str, Any] = {"versions": _read_targets(arguments.versions), "follows_pushes": arguments.follow}
    if arguments.expect is not None:
        body["expected"] = _read_targets(arguments.expect)
    with tenant_client() as client:
        if arguments.delete:
            check(client.delete(_path(arguments)))
            print(f"removed {arguments.name}@{arguments.alias}")
        elif is_move:
            _print_alias(check(client.put(_path(arguments), json=body)), as_json=arguments.json)
        else:
            _print_alias(check(client.get(_path(arguments))), as_json=arguments.json)


@command(
    "adapter rollback",
    "undo the last move of an alias",
    argument("name"),
    argument("alias", nargs="?", default="latest", help="default latest, which the bare name serves"),
    has_json=True,
)
@explained
def roll_back(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        _print_alias(check(client.post(_path(arguments) + "/rollback")), as_json=arguments.json)


_PLACE_COLUMNS = {
    "VERSION": lambda version: str(version["version"]),
    "PLACE": lambda version: version["place"],
}


@command(
    "adapter prewarm",
    "load an adapter before its first request, and show where it is",
    argument("name", metavar="NAME[@N|@ALIAS]"),
    has_json=True,
)
@explained
def prewarm(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        answer = check(client.post(f"/v1/adapters/{quote(arguments.name, safe='')}/prewarm"))
    print_records(answer["versions"], _PLACE_COLUMNS, as_json=arguments.json)


_PIN = (
    argument("name", metavar="NAME[@ALIAS]"),
    argument("--tenant", required=True, metavar="T", help="the tenant that owns the adapter"),
)


def _pin_path(arguments: argparse.Namespace) -> str:
    return f"/admin/tenants/{quote(arguments.tenant, safe='')}/adapters/{quote(arguments.name, safe='')}/pin"


@command("adapter pin", "keep a tenant's adapter in the page pool (operator)", *_PIN, has_json=True)
@explained
def pin(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        print_records([check(client.put(_pin_path(arguments)))], _COLUMNS, as_json=arguments.json)


@command(
    "adapter unpin",
    "allow the page pool to evict a pinned adapter again (operator)",
    *_PIN,
    has_json=True,
)
@explained
def unpin(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        print_records([check(client.delete(_pin_path(arguments)))], _COLUMNS, as_json=arguments.json)


_PIN_COLUMNS = {
    "TENANT": lambda pin: pin["tenant"],
    "ALIAS": lambda pin: f"{pin['name']}@{pin['alias']}",
    "VERSIONS": lambda pin: " ".join(f"{number}={percent}" for number, percent in pin["versions"].items()),
}


@command("adapter pins", "list the pins of all tenants (operator)", has_json=True)
@explained
def pins(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        found = sorted(
            walk(client, "/admin/pins"), key=lambda pin: (pin["tenant"], pin["name"], pin["alias"])
        )
        print_records(found, _PIN_COLUMNS, as_json=arguments.json)
