"""`slora adapter`: a tenant's adapters. A push streams the files; they are never read into memory whole.

A push from the Hugging Face hub goes through this machine: the server fetches nothing that a tenant names. What pins
and unpins is the operator.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slora.errors import ConfigError
from slora.weights.base_fingerprint import fingerprint
from slora_adapters.errors import AdapterError
from slora_adapters.peft.hub_reference import HubReference
from slora_adapters.peft.hub_snapshot import HubSnapshot, download
from slora_api.cli.remote import CommandFailed, admin_client, check, explained, tenant_client, walk

__all__ = ["pin", "pins", "prewarm", "push", "remove", "show", "unpin"]

# Multipart field -> the file that peft and transformers write.
_REQUIRED = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
_OPTIONAL = {
    "tokenizer_config": "tokenizer_config.json",
    "chat_template": "chat_template.jinja",
    "generation_config": "generation_config.json",
}
_ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")


def _find_files(source: Path) -> dict[str, Path]:
    """By multipart field: the files of a directory, or an archive, which the server looks into."""
    return {"archive": source} if source.is_file() else _find_members(source)


def _find_members(directory: Path) -> dict[str, Path]:
    missing = [name for name in _REQUIRED.values() if not (directory / name).is_file()]
    if missing:
        raise CommandFailed(
            f"{directory} has no {' and no '.join(missing)}; give a PEFT adapter's directory or an archive of it"
        )
    found = {field: directory / name for field, name in (_REQUIRED | _OPTIONAL).items()}
    return {field: path for field, path in found.items() if path.is_file()}


def _download(text: str) -> HubSnapshot | None:
    """What hf:// names, or None if it is something on this machine."""
    try:
        reference = HubReference.parse(text)
        return download(reference) if reference else None
    except (AdapterError, ValueError) as error:
        raise CommandFailed(str(error)) from error


def _summary(adapter: dict[str, Any]) -> str:
    modules = ",".join(adapter["target_modules"])
    size = f"rank {adapter['rank']}  {adapter['bytes']} bytes"
    line = f"{adapter['name']}  version {adapter['version']}  {size}  {modules}  {adapter['digest']}"
    return line + "  pinned" if adapter["pinned"] else line


def _default_name(source: Path) -> str:
    """The directory's name, or the archive's without what says that it is one."""
    name = source.resolve().name
    suffix = next((suffix for suffix in _ARCHIVE_SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix) if source.is_file() else name


def _fingerprint(directory: Path) -> str:
    try:
        return fingerprint(directory)
    except ConfigError as error:
        raise CommandFailed(str(error)) from None


@explained
def push(arguments: argparse.Namespace) -> None:
    fields = {"base_fingerprint": _fingerprint(Path(arguments.base))} if arguments.base else {}
    snapshot = _download(arguments.source)
    source = snapshot.directory if snapshot else Path(arguments.source)
    own_name = snapshot.reference.name if snapshot else _default_name(source)
    fields["name"] = arguments.name or own_name
    with tenant_client() as client, ExitStack() as stack:
        files = {
            field: (path.name, stack.enter_context(path.open("rb")))
            for field, path in _find_files(source).items()
        }
        pushed = check(client.post("/v1/adapters", data=fields, files=files))
    known = "" if pushed["new_version"] else "  (it was the newest version already)"
    print(f"{_summary(pushed)}  base {pushed['certificate']['base']}{known}")
    if snapshot:
        print(f"from {snapshot.reference}")


@explained
def show(_arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        for adapter in walk(client, "/v1/adapters"):
            print(_summary(adapter))


@explained
def remove(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        params = {"force": "true"} if arguments.force else {}
        check(client.delete(f"/v1/adapters/{quote(arguments.name, safe='')}", params=params))
    print(f"{arguments.name} removed")


@explained
def prewarm(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        answer = check(client.post(f"/v1/adapters/{quote(arguments.name, safe='')}/prewarm"))
    for version in answer["versions"]:
        print(f"{arguments.name}  version {version['version']}  {version['place']}")


def _pin_path(arguments: argparse.Namespace) -> str:
    return f"/admin/tenants/{quote(arguments.tenant, safe='')}/adapters/{quote(arguments.name, safe='')}/pin"


@explained
def pin(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        print(_summary(check(client.put(_pin_path(arguments)))))


@explained
def pins(_arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        for pin in check(client.get("/admin/pins"))["data"]:
            targets = "  ".join(f"{number}={weight}" for number, weight in pin["versions"].items())
            print(f"{pin['tenant']}  {pin['name']}@{pin['alias']}  {targets}")


@explained
def unpin(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        print(_summary(check(client.delete(_pin_path(arguments)))))
