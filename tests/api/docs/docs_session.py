"""Runs the code blocks of the documentation against a server, in order, as a reader would.

Before each block, the tenant, the keys and the adapters exist that the documentation talks about. The address of the
server and names in capitals, such as KEY_ID, are replaced by those of the test.
"""

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.api.docs.code_block import ROOT, CodeBlock, split_command
from tests.api.docs.command_check import is_run
from tests.api.platform import FIELDS, bearer
from tests.api.served import SLORA, environment
from tests.support.tool_templates import HERMES

_ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000")
_TENANT = "acme"
# Owns the keys whose ids replace KEY_ID, and all keys while the commands of a block create acme.
_OTHER_TENANT = "reader"
# A variable whose value a reader has to fill in. The test sets it in the environment.
_TO_FILL_IN = re.compile(r"\b[A-Z_]+=\S*\.\.\.(?=\s|$)")
# Adapter -> the demo's adapters that become its versions, and the alias of its newest version.
_ADAPTERS = {
    "greeter": (("upper", "spell", "title"), "latest"),
    "shout": (("upper", "title"), "latest"),
    "brief": (("initials",), "latest"),
    "legal": (("rot13",), "prod"),
    "helper": (("mirror",), "prod"),
}
_WITH_TOOLS = "assistant"
_RUN_PYTHON = """
import ast, asyncio, json, sys
names = {}
for source in json.load(sys.stdin):
    code = compile(source, "<documentation>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if (waited := eval(code, names)) is not None:
        asyncio.run(waited)
"""
_NAMES_OF_PYTHON_BLOCKS = """
import asyncio
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1")
tools = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]

def call_tool(call):
    return "sunny"
"""
_TRAINED_MODEL = """
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("demo/model"), "demo/adapters/upper")
"""


@dataclass(frozen=True)
class DocsSession:
    """url, admin_key: the server. data_dir: its data directory. folder: the working directory of the commands."""

    url: str
    admin_key: str
    data_dir: Path
    folder: Path

    def run_block(self, block: CodeBlock, key: str) -> None:
        """Runs the commands of a console block that tests run. Raises AssertionError with what a command printed."""
        commands = [one for one in block.commands() if all(map(is_run, split_command(one)))]
        if commands:
            self._run(
                ["bash", "-euo", "pipefail", "-c", self._fill_in("\n".join(commands))], block.place, key
            )

    def run_python(self, blocks: Sequence[CodeBlock], key: str) -> None:
        """Runs the Python blocks of a page one after the other, in one process."""
        sources = [_NAMES_OF_PYTHON_BLOCKS, *(block.text for block in blocks)]
        if any("get_peft_model_state_dict" in source for source in sources):
            sources.insert(1, _TRAINED_MODEL)
        programs = json.dumps([self._fill_in(source) for source in sources])
        self._run([sys.executable, "-P", "-c", _RUN_PYTHON], blocks[0].place, key, programs)

    def send_json(self, block: CodeBlock, key: str) -> None:
        """Sends the body of a chat that a page shows."""
        body = {**json.loads(block.text), "max_tokens": 4}
        with httpx.Client(base_url=self.url, headers=bearer(key), verify=False) as client:
            answer = client.post("/v1/chat/completions", json=body)
        assert answer.is_success, f"{block.place}: {answer.text}"

    def prepare(self, text: str) -> str:
        """Makes the tenant with its adapters, unless the commands of `text` make it. Returns one of its keys."""
        with httpx.Client(base_url=self.url, headers=bearer(self.admin_key), verify=False) as admin:
            names = [one["name"] for one in admin.get("/admin/tenants").raise_for_status().json()["data"]]
            made = re.findall(r"slora tenant (?:create|rename \S+) (\S+)", text)
            for name in {*made} & {*names}:
                purge = {"confirm": name, "ledger": "keep"}
                admin.post(f"/admin/tenants/{name}/purge", json=purge).raise_for_status()
            owner = _OTHER_TENANT if _TENANT in made else _TENANT
            if owner not in names:
                admin.post("/admin/tenants", json={"name": owner}).raise_for_status()
            body = {"adapter": _WITH_TOOLS}
            key: str = admin.post(f"/admin/tenants/{owner}/keys", json=body).raise_for_status().json()["key"]
        self._push_adapters(key)
        return key

    def _push_adapters(self, key: str) -> None:
        with httpx.Client(base_url=self.url, headers=bearer(key), verify=False) as client:
            listed = client.get("/v1/adapters").raise_for_status().json()["data"]
            known = {one["name"]: one["version"] for one in listed}
            for name, (sources, alias) in _ADAPTERS.items():
                # The commands of another page may have pushed fewer versions.
                for source in sources if known.get(name, 0) < len(sources) else ():
                    _upload(client, name, source)
                if name not in known and alias != "latest":
                    client.put(
                        f"/v1/adapters/{name}/aliases/{alias}", json={"versions": {"1": 100}}
                    ).raise_for_status()
            if _WITH_TOOLS not in known:
                _upload(client, _WITH_TOOLS, "double", HERMES)

    def make_folder(self) -> None:
        """Makes the working directory of a page: the demo, an adapter of the reader, and a file of requests."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "bin").mkdir(parents=True)
        (self.folder / "demo").symlink_to(ROOT / "demo")
        shutil.copytree(ROOT / "demo" / "adapters" / "snake", self.folder / "my-adapter")
        body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        line = {"custom_id": "a1", "method": "POST", "url": "/v1/chat/completions", "body": body}
        (self.folder / "requests.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
        curl = shutil.which("curl")
        assert curl, "the documentation uses curl: install Debian's package curl"
        # An error of the server fails the block, and the output says what it was.
        self._write_program("curl", [curl, "--fail-with-body"])
        self._write_program("slora", SLORA)
        self._write_program("python", [sys.executable, "-P"])

    def _write_program(self, name: str, command: Sequence[str]) -> None:
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def _fill_in(self, text: str) -> str:
        text = _ADDRESS.sub(self.url, _TO_FILL_IN.sub("", text))
        text = text.replace(" /srv/slora", f" {self.data_dir}")
        for path in ("/backups", "/srv"):
            text = text.replace(f" {path}/", f" {self.folder}{path}/")
        if "KEY_ID" in text:
            text = text.replace("KEY_ID", self._make_key_id("admin-key" in text))
        return text

    def _make_key_id(self, is_operator: bool) -> str:
        with httpx.Client(base_url=self.url, headers=bearer(self.admin_key), verify=False) as admin:
            if is_operator:
                answer = admin.post("/admin/keys", json={"name": "reader"})
            else:
                admin.post("/admin/tenants", json={"name": _OTHER_TENANT})  # a 409 says that it exists
                answer = admin.post(f"/admin/tenants/{_OTHER_TENANT}/keys", json={})
            identifier: str = answer.raise_for_status().json()["key_id"]
        return identifier

    def _run(self, command: Sequence[str], place: str, key: str, programs: str = "") -> None:
        variables = {
            "SLORA_URL": self.url,
            "SLORA_ADMIN_KEY": self.admin_key,
            "SLORA_DATA_DIR": str(self.data_dir),
            "XDG_CACHE_HOME": str(self.folder),  # without the real model of the demo
        }
        variables |= {"SLORA_API_KEY": key, "KEY": key, "OPENAI_API_KEY": key}
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env=environment(PATH=path, **variables),
            input=programs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        assert ended.returncode == 0, f"{place}: {command[-1]}\n{ended.stdout}"


def _upload(client: httpx.Client, name: str, source: str, chat_template: str = "") -> None:
    folder = ROOT / "demo" / "adapters" / source
    files = {
        FIELDS[path.name]: (path.name, path.read_bytes()) for path in folder.iterdir() if path.name in FIELDS
    }
    if chat_template:
        files["chat_template"] = ("chat_template.jinja", chat_template.encode())
    client.post("/v1/adapters", data={"name": name}, files=files).raise_for_status()
