"""Attacks by uploads: texts that lists read, pushes at once beside a quota, archives that cost time."""

import json
import tarfile
import time
from collections.abc import Callable
from functools import partial

from bench.attacks.answers import beside_each_other, count, sent
from bench.attacks.target import Target, adapter_files

__all__ = ["large_extras", "nested_tars", "odd_generation_config", "racing_pushes"]

_NUM_VERSIONS = 30
_NUM_LISTS = 30
_NUM_ROUNDS = 10


def large_extras(target: Target) -> Callable[[], str]:
    """Versions with half a megabyte of texts each, and lists of them at once."""
    key = target.key("mallory")
    template = "{{ messages[-1].content }}{# " + "x" * 250_000 + " #}"
    config = json.dumps({"temperature": 1.0}) + " " * 250_000
    refused = []
    for at in range(_NUM_VERSIONS):
        files = adapter_files(4 + at, chat_template=template, generation_config=config)
        answer = sent(partial(target.upload, key, "large", files))
        if not answer.startswith("201"):
            refused.append(answer)

    def run() -> str:
        with target.client(key) as client:
            urls = ["/v1/adapters/large/versions?limit=1000", "/v1/models", "/v1/adapters?limit=1000"]
            sends = [partial(client.get, urls[at % 3]) for at in range(_NUM_LISTS)]
            answers = beside_each_other(sends)
        return f"{_NUM_VERSIONS - len(refused)} versions; {count(answers)} {count(refused)}"

    return run


def racing_pushes(target: Target) -> Callable[[], str]:
    """Two pushes at once of a tenant that may have one version, on one host."""

    def run() -> str:
        rounds = []
        for at in range(_NUM_ROUNDS):
            key = target.key(f"racer{at}")
            with target.admin() as admin:
                admin.patch(
                    f"/admin/tenants/racer{at}/quota", json={"adapter_versions": 1}
                ).raise_for_status()
            sends = [partial(target.upload, key, "mine", adapter_files(4 + number)) for number in range(2)]
            answers = beside_each_other(sends)
            rounds.append(f"{sum(answer.startswith('201') for answer in answers)} accepted")
        return f"limit of 1 version: {count(rounds)}"

    return run


def _raw_header(name: bytes, kind: bytes, num_bytes: int) -> bytes:
    info = tarfile.TarInfo(name.decode())
    info.type, info.size = kind, num_bytes
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 512)


def long_name_tar(num_headers: int) -> bytes:
    """Each header says that the name of the next member is long; the next member is such a header again."""
    link = _raw_header(b"././@LongLink", tarfile.GNUTYPE_LONGNAME, 4) + _padded(b"abc\0")
    return link * num_headers + _raw_header(b"x", tarfile.REGTYPE, 0) + bytes(1024)


def pax_tar(num_bytes: int) -> bytes:
    """One extended header of many short records."""
    record = b"9 a=bbbb\n"
    raw = record * (num_bytes // len(record))
    return (
        _raw_header(b"pax", tarfile.XHDTYPE, len(raw))
        + _padded(raw)
        + _raw_header(b"x", tarfile.REGTYPE, 0)
        + bytes(1024)
    )


def nested_tars(target: Target) -> Callable[[], str]:
    key = target.key("mallory")

    def run() -> str:
        said = []
        for name, raw in (("long names", long_name_tar(3000)), ("pax header", pax_tar(8 << 20))):
            start = time.perf_counter()
            answer = sent(partial(target.upload, key, "tar", {"archive": raw}))
            said.append(f"{name}: {answer} after {time.perf_counter() - start:.1f} s")
        return "; ".join(said)

    return run


def odd_generation_config(target: Target) -> Callable[[], str]:
    key = target.key("mallory")

    def run() -> str:
        config = json.dumps({"eos_token_id": 1 << 64})
        uploaded = sent(partial(target.upload, key, "odd", adapter_files(generation_config=config)))
        return f"upload: {uploaded}; then a chat: {sent(partial(target.chat, key, 'odd'))}"

    return run
