"""`slora serve --store`: clients see no difference between stores."""

import os
import shutil
from pathlib import Path

from tests.api.conftest import Kit
from tests.api.served import ADMIN_KEY, environment, serving
from tests.api.server.test_server import upload
from tests.support import shared_files


def with_far_files(folder: Path) -> dict[str, str]:
    """An environment with a package that adds shared:// to fsspec, as s3fs adds s3://."""
    shutil.copy(shared_files.__file__, folder / "far_files.py")
    about = folder / "far_files-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: far-files\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nshared = far_files:SharedFiles\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return environment(SLORA_ADMIN_KEY=ADMIN_KEY, PYTHONPATH=path, SLORA_STORE=f"shared://{folder}/objects")


def test_adapters_in_an_object_store_are_kept_there_alone_and_served_from_there(
    kit: Kit, tmp_path: Path
) -> None:
    objects, data = tmp_path / "objects" / "blobs", tmp_path / "data"
    with serving(kit.base, data, env=with_far_files(tmp_path)) as served:
        served.wait_until_ready()
        key = served.make_key("far")
        created = upload(served, key, "voice", kit.wide)
        assert created.status_code == 201, created.text
        digest = created.json()["digest"].removeprefix("sha256:")
        assert (objects / digest[:2] / digest).is_dir()
        assert not list(data.rglob("*.safetensors"))
        with served.client(key) as client:
            answer = client.post("/v1/completions", json={"model": "voice", "prompt": "hi", "max_tokens": 4})
            assert answer.headers["x-slora-adapter"] == "voice@1", answer.text
            assert client.delete("/v1/adapters/voice").is_success
    assert not [path for path in objects.rglob("*") if path.is_file()]
