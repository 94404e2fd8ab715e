"""Tests deploy/kubernetes without a cluster: the schemas of Kubernetes, and what the manifests say of one another."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from slora_api.core.settings import read_settings, unknown_variables
from slora_api.keys.authentication import PUBLIC_PATHS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"


def read_manifests() -> list[dict[str, Any]]:
    """The manifests that `kubectl apply -f deploy/kubernetes` applies."""
    return [
        one
        for path in sorted(FOLDER.glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def find(kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in read_manifests() if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def workloads() -> list[dict[str, Any]]:
    return [one for one in read_manifests() if one["kind"] in ("StatefulSet", "Deployment")]


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_the_manifests_follow_the_schema_of_kubernetes(version: str) -> None:
    manifests = read_manifests()
    assert len(manifests) == 8
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    # Shows that the schema can reject a manifest.
    (container,) = manifests[-1]["spec"]["template"]["spec"]["containers"]
    container["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifests[-1], version, strict=True)


def test_each_variable_is_a_setting_that_the_server_accepts() -> None:
    chosen = dict(find("ConfigMap", "slora")["data"])
    (container,) = find("StatefulSet", "slora")["spec"]["template"]["spec"]["containers"]
    given = {"SLORA_DATABASE": "postgresql://u:p@host/slora", "SLORA_STORE": "s3://bucket/folder"}
    for variable in container["env"]:
        chosen[variable["name"]] = variable.get("value") or given.get(variable["name"], "a-long-secret-text")
    assert not unknown_variables(chosen)
    settings = read_settings({}, chosen)
    assert settings.data_dir == "/data/slora"
    assert find("Service", "slora")["spec"]["ports"][0]["port"] == settings.port
    # Kubernetes would set SLORA_PORT for the service of this name.
    assert find("StatefulSet", "slora")["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_requests_in_progress_may_finish_before_a_pod_is_killed() -> None:
    pod = find("StatefulSet", "slora")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    paused = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drained = float(find("ConfigMap", "slora")["data"]["SLORA_DRAIN_SECONDS"])
    assert pod["terminationGracePeriodSeconds"] > paused + drained
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")]
    assert probes == ["/healthz", "/healthz", "/readyz"] and PUBLIC_PATHS.issuperset(probes)


def test_no_container_is_root_or_writes_outside_of_its_volumes() -> None:
    for workload in workloads():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        volumes = {one["name"] for one in pod["volumes"]}
        volumes |= {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {one["name"] for one in container["volumeMounts"]} == volumes
    server = find("StatefulSet", "slora")["spec"]["template"]["spec"]
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    context = server["securityContext"]
    assert user and user.groups() == (str(context["runAsUser"]), str(context["runAsGroup"]))
    written = {
        mount["mountPath"] for mount in server["containers"][0]["volumeMounts"] if "readOnly" not in mount
    }
    data = find("ConfigMap", "slora")["data"]
    for name in ("SLORA_DATA_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"):
        assert any(data[name].startswith(f"{path}/") for path in written), name


def test_services_policies_and_the_monitor_select_pods_that_exist() -> None:
    pods = {one["metadata"]["name"]: one["spec"]["template"] for one in workloads()}
    ports = {
        name: {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        for name, pod in pods.items()
    }
    for name, pod in pods.items():
        labels = pod["metadata"]["labels"]
        service = find("Service", name)["spec"]
        assert service["selector"] == labels
        assert {port["targetPort"] for port in service["ports"]} <= ports[name]
        policy = find("NetworkPolicy", name)["spec"]
        assert policy["podSelector"]["matchLabels"] == labels
        assert {port["port"] for port in policy["ingress"][0]["ports"]} <= ports[name]
    monitor = yaml.safe_load((FOLDER / "monitoring" / "pod-monitor.yaml").read_text(encoding="utf-8"))
    assert monitor["spec"]["selector"]["matchLabels"] == pods["slora"]["metadata"]["labels"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports["slora"]


def test_secrets_are_in_no_file_and_the_guide_makes_each_of_them() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert not any(one["kind"] == "Secret" for one in read_manifests())
    manifests = "".join(path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.yaml"))
    named = set(re.findall(r"(?:secretKeyRef: \{|credentials: \{) name: (\S+), key: ([\w-]+)", manifests))
    assert len(named) == 5
    for secret, key in named:
        assert re.search(rf"create secret generic {secret} (?:[^$]|\$\()*--from-literal={key}=", text), (
            secret,
            key,
        )
    for path in re.findall(r"kubectl apply -f (\S*/\S*)", text):
        assert (ROOT / path).exists()
