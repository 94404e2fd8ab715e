"""The prices of tokens: set by the operator, read by any key, kept in the database."""

from pathlib import Path

import pytest

from tests.api.platform import ADMIN_KEY, Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine

NONE = {"object": "prices", "currency": "", "input": None, "cached_input": None, "output": None}


def test_prices_are_kept_and_every_key_reads_them(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine()) as platform, platform.client(ADMIN_KEY) as admin:
        key = platform.key("acme")
        assert admin.get("/v1/prices").json() == NONE
        changed = admin.put("/admin/prices", json={"currency": "EUR", "input": 0.25, "output": 2})
        assert changed.json() == {**NONE, "currency": "EUR", "input": 0.25, "cached_input": 0.25, "output": 2}
        assert platform.api(key).put("/admin/prices", json={"input": 0}).status_code == 403
    with running_platform(tmp_path, ScriptedEngine()) as platform:
        assert platform.api(key).get("/v1/prices").json() == changed.json()
        admin = platform.api(ADMIN_KEY)
        cached = {"input": 1, "cached_input": 0, "output": 2}
        assert admin.put("/admin/prices", json=cached).json()["cached_input"] == 0
        assert admin.put("/admin/prices", json={}).json() == NONE


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"input": -1}', "input"),
        ('{"output": 1e7}', "output"),
        ('{"output": NaN}', "output"),
        ('{"cached_input": "1"}', "cached_input"),
        ('{"currency": "a long currency"}', "currency"),
        ('{"price": 1}', "price"),
    ],
)
def test_a_wrong_price_is_refused_and_changes_nothing(platform: Platform, body: str, param: str) -> None:
    admin = platform.api(ADMIN_KEY)
    before = admin.get("/v1/prices").json()
    refused = admin.put("/admin/prices", content=body, headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert admin.get("/v1/prices").json() == before
