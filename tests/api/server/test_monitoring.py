"""The files in deploy/: a real Prometheus scrapes a server, and each query of the dashboard and the alerts has data."""

import json
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.api.conftest import Kit
from tests.api.served import ADMIN_KEY, Served
from tests.api.server.test_server import upload
from tests.prometheus_server import find_program, running_prometheus
from tests.support.repeated_calls import repeating

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "slora.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
ROOT = DEPLOY.parent
# The comparison at the end of an alert.
_COMPARISON = re.compile(r"\s[<>]\s[0-9.e]+$")


def read_alerts() -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def read_queries() -> dict[str, str]:
    """The queries by the name of their panel or alert. Variables of Grafana are replaced as Grafana does."""
    queries = {}
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
            queries[f"{panel['title']}, {target['refId']}"] = query
    for alert in read_alerts():
        query, count = _COMPARISON.subn("", alert["expr"])
        assert count == 1, f"{alert['alert']} does not end with a comparison"
        queries[alert["alert"]] = query
    return queries


def write_config(directory: Path, served: Served) -> Path:
    """The configuration of docker-compose.yml for this server, with the shortest interval that makes sense."""
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    secret = directory / "metrics-key"
    with served.client(ADMIN_KEY) as operator:
        made = operator.post("/admin/keys", json={"name": "prometheus", "scopes": ["metrics:read"]})
    secret.write_text(made.raise_for_status().json()["key"], encoding="utf-8")
    for before, after in (
        ("/run/secrets/slora_metrics_key", str(secret)),
        ("slora:8000", served.url.removeprefix("http://")),
        ("15s", "200ms"),
        ("alerts.yml", str(ALERTS)),
    ):
        assert before in text
        text = text.replace(before, after)
    config = directory / "prometheus.yml"
    config.write_text(text, encoding="utf-8")
    return config


def make_load(served: Served, kit: Kit, key: str) -> None:
    """Sends requests of a tenant to the base model, a cold and a warm adapter."""
    body = {"prompt": "a" * 40, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with served.client(key) as client:
        assert upload(served, key, "watched", kit.wide).status_code == 201
        for model in ("base", "watched", "watched"):
            client.post("/v1/completions", json=body | {"model": model}).raise_for_status()
        client.delete("/v1/adapters/watched").raise_for_status()


def exceed_a_quota(served: Served) -> int:
    """Returns the status of a request beyond its tenant's quota."""
    key = served.make_key("monitored-limited")
    with served.client(ADMIN_KEY) as operator, served.client(key) as client:
        quota = {"requests_per_minute": 1}
        operator.patch("/admin/tenants/monitored-limited/quota", json=quota).raise_for_status()
        body = {"model": "base", "prompt": "a", "max_tokens": 1}
        client.post("/v1/completions", json=body).raise_for_status()
        return client.post("/v1/completions", json=body).status_code


def test_prometheus_accepts_the_alerts_and_the_configuration(tmp_path: Path) -> None:
    promtool = find_program("promtool")
    done = subprocess.run([promtool, "check", "rules", ALERTS], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    broken = tmp_path / "broken.yml"
    broken.write_text(ALERTS.read_text(encoding="utf-8").replace("rate(", "rat(", 1), encoding="utf-8")
    assert subprocess.run([promtool, "check", "rules", broken], capture_output=True).returncode


def test_each_query_of_the_dashboard_and_of_the_alerts_has_data(
    server: Served, kit: Kit, tmp_path: Path
) -> None:
    load = partial(make_load, server, kit, server.make_key("monitored"))
    # A query over the last minute then has data at any time.
    with running_prometheus(write_config(tmp_path, server)) as prometheus, repeating(load, pause_s=1):
        prometheus.wait_for("slora_ready == 1")
        # A rate needs two counts.
        prometheus.wait_for("count_over_time(slora_ready[1m]) >= 2")
        assert exceed_a_quota(server) == 429
        for name, query in read_queries().items():
            assert prometheus.wait_for(query), name
        rules = prometheus.client.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
        assert len(rules) == len(read_alerts())
        assert all(rule["health"] != "err" for rule in rules), rules
        assert not prometheus.query("vllm:lora_requests_info")


def test_the_guide_says_what_to_do_about_each_alert() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    for alert in read_alerts():
        assert f"| `{alert['alert']}` |" in text


def test_the_guide_has_the_metrics_that_exist_and_no_others(server: Served) -> None:
    with server.client(ADMIN_KEY) as operator:
        text = operator.get("/metrics").text
    known = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    named = set(
        re.findall(
            r"`((?:vllm:|slora_)[a-z0-9_]+)`", (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
        )
    )
    assert len(named) > 40
    missing = {name for name in named if name not in known and name.removesuffix("_total") not in known}
    assert not missing
    # The client's library adds the time at which a counter began.
    assert not {
        name for name in known if not {name, f"{name}_total"} & named and not name.endswith("_created")
    }


def test_the_files_of_grafana_name_the_folders_that_compose_mounts() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    mounts = dict(
        volume.split(":")[:2] for volume in compose["grafana"]["volumes"] if volume.startswith("./")
    )
    assert all((ROOT / folder).is_dir() for folder in mounts)
    provider = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/dashboards/slora.yml").read_text(encoding="utf-8")
    )["providers"][0]
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    source = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    )
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))[
        "scrape_configs"
    ][0]
    assert scraped["static_configs"] == [{"targets": ["slora:8000"]}]
    assert scraped["authorization"]["credentials_file"] == "/run/secrets/slora_metrics_key"
    assert compose["prometheus"]["secrets"] == ["slora_metrics_key"]
