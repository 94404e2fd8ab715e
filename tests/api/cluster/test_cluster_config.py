"""Cluster files and the other input of `slora deploy`: what is accepted, and why the rest is refused."""

from pathlib import Path

import pytest

from slora.core.errors import ConfigError
from slora.core.setting import SettingRefused
from slora_api.cli.main import main
from slora_api.cluster.cluster_config import ClusterConfig, read_cluster_file, read_secret
from slora_api.serve.cluster_command import check_ray_version
from tests.api.conftest import Kit

SECRET = b"s" * 64


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_cluster_file_has_the_settings_of_the_cluster_and_of_the_server(tmp_path: Path) -> None:
    texts = read_cluster_file(
        write(
            tmp_path,
            "model: /models/llama\nreplicas: 2\nmax_replicas: 4\nsurge: off\npool_bytes: 2GiB\n"
            "prefix_cache: 'off'\nscale_seconds: 1.5\nmax_model_len: auto\n",
        )
    )
    config = ClusterConfig.read(texts, {"SLORA_REPLICAS": "3", "SLORA_CLUSTER_NAME": "blue"})
    assert (config.server.replicas, config.cluster.max_replicas) == (2, 4)
    assert (config.cluster.surge, config.cluster.scale_seconds) == (False, 1.5)
    assert config.server.engine.pool_bytes == 2 << 30 and config.server.engine.prefix_cache == "off"
    assert config.cluster.cluster_name == "blue"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("replicsa: 2", "'replicsa' is not a setting; did you mean replicas?"),
        ("0: 2", "'?0'? is not a setting; docs/cluster.md lists all settings"),
        ("replicas: 0", "replicas is '0'; it must be a whole number from 1 to 64"),
        ("replicas: two", "replicas is 'two'; it must be a whole number from 1 to 64"),
        ("replicas: 2.5", "replicas is '2.5'; it must be a whole number from 1 to 64"),
        ("replicas: [1, 2]", r"replicas is \[1, 2\]; it must be a whole number from 1 to 64"),
        ("replicas:", "replicas is None; it must be a whole number from 1 to 64"),
        ("surge: maybe", "surge is 'maybe'; it must be on or off"),
        ("dtype: float8", "dtype is 'float8'; it must be auto, float32, bfloat16 or float16"),
        ("replicas: 2\nreplicas: 3", "replicas occurs twice: remove one of the two lines"),
        ("", "has no settings: write lines such as `replicas: 2`"),
        ("- replicas", "has no settings"),
        ("replicas: [", "is not YAML"),
        ("replicas: !!python/object/apply:os.system [ls]", "is not YAML"),
    ],
)
def test_a_cluster_file_with_a_mistake_is_refused_with_its_key_value_and_remedy(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        read_cluster_file(write(tmp_path, text))
    assert "cluster.yaml" in str(refused.value)


def test_fewer_replicas_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_replicas is 2, below replicas 3: raise max_replicas"):
        ClusterConfig.read({"model": "m", "replicas": "3", "max_replicas": "2"}, {})
    with pytest.raises(SettingRefused, match="--model"):
        ClusterConfig.read({"replicas": "3"}, {})


def test_another_ray_is_refused_with_the_command_that_installs_the_right_one() -> None:
    for version in ("2.9.3", "2.61.0", "3.0.0"):
        with pytest.raises(ConfigError, match=f"Ray {version} is installed.*needs Ray 2.60: run pip install"):
            check_ray_version(version)
    check_ray_version("2.60.3")


def test_the_command_refuses_another_ray_before_it_does_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slora_api.serve.cluster_command.version", lambda name: "2.40.0")
    assert main(["deploy", "missing.yaml"]) == 2
    assert "Ray 2.40.0 is installed" in capsys.readouterr().err


def test_the_command_prints_why_it_refuses_a_cluster_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        read_cluster_file(tmp_path / "missing.yaml")
    for command in (["deploy"], ["cluster", "status"], ["cluster", "stop"], ["cluster", "serve"]):
        assert main([*command, str(write(tmp_path, "replicsa: 2"))]) == 2
        assert "did you mean replicas?" in capsys.readouterr().err


def test_a_server_without_the_secret_of_the_cluster_is_told_where_to_get_it(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(kit.base), "--data-dir", str(tmp_path)]
    assert main(["cluster", "serve", *flags]) == 2
    assert "copy it from the host where `slora deploy` ran" in capsys.readouterr().err
    (tmp_path / "cluster-secret").write_text("short\n", encoding="utf-8")
    assert main(["cluster", "serve", *flags]) == 2
    assert "has 5 bytes; it must have 32 to 4096" in capsys.readouterr().err


def test_a_new_secret_can_be_read_by_its_owner_only_and_is_kept(tmp_path: Path) -> None:
    config = ClusterConfig.read({"model": "m", "data_dir": str(tmp_path / "data")}, {})
    secret = read_secret(config, create=True)
    assert len(secret) == 64 and config.secret_file.stat().st_mode & 0o777 == 0o600
    assert read_secret(config, create=True) == secret


def test_replicas_get_the_settings_that_they_need_and_the_paths_of_this_host() -> None:
    texts = {
        "model": "demo/model",
        "port": "9000",
        "admin_key": "topsecret",
        "replicas": "3",
        "redis": "redis://x",
    }
    environment = {"SLORA_STALL_SECONDS": "5", "SLORA_HOST": "0.0.0.0", "SLORA_DTYPE": "float32"}
    given = ClusterConfig.read(texts, environment).replica_texts(environment)
    assert given.keys() == {
        *("model", "model_name", "data_dir", "store"),
        *("redis", "stall_seconds", "dtype"),
    }
    assert Path(given["model"]).is_absolute() and given["model_name"] == "model"
    assert given["store"] == str(Path("data/adapters").resolve())


def test_only_a_change_that_replicas_notice_changes_their_version() -> None:
    def version(environment: dict[str, str] | None = None, **texts: str) -> str:
        config = ClusterConfig.read({"model": "m", **texts}, environment or {})
        return config.version(environment or {}, SECRET)

    assert version() == version(replicas="3") == version(port="9000") == version(max_replicas="8")
    changed = [
        version(pool_bytes="1GiB"),
        version(redis="redis://x"),
        version(environment={"SLORA_DTYPE": "float32"}),
    ]
    assert len({version(), *changed}) == 4
    config = ClusterConfig.read({"model": "m"}, {})
    assert config.version({}, SECRET) != config.version({}, b"t" * 64)
