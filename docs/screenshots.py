"""Makes the screenshots of the console in docs/images: `python -m docs.screenshots`.

It serves the demo with a small pool, sends requests of all tenants, and opens the console in the machine's Chromium. It
takes about six minutes, most of them for the history of the view Health.
"""

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
DEMO = Path(__file__).parent.parent / "demo" / "smollm2"
ADAPTERS = DEMO / "adapters"
MAX_BYTES = 200_000
TENANT = "acme"
ADMIN_KEY = "the-key-of-the-screenshots"
URL = "http://127.0.0.1:8459"
# Seconds until the charts have something to show.
WATCHED_S = 260
WIDE, NARROW = (1440, 1120), (390, 844)


@contextmanager
def demo(directory: str) -> Iterator[dict[str, str]]:
    """Serves the demo. Yields the keys of its tenants."""
    command = [
        sys.executable,
        "-P",
        "-c",
        "from slora_api.cli.main import main; raise SystemExit(main())",
        "demo",
    ]
    command += ["--port", URL.rpartition(":")[2], "--data-dir", directory, "--pool-bytes", "64MiB"]
    server = subprocess.Popen([*command, "--admin-key", ADMIN_KEY], stdout=subprocess.DEVNULL)
    try:
        while not is_ready():
            assert server.poll() is None, "the server could not start"
            time.sleep(0.5)
        yield json.loads((Path(directory) / "demo-keys.json").read_text(encoding="utf-8"))
    finally:
        server.terminate()
        server.wait()


def is_ready() -> bool:
    try:
        return httpx.get(f"{URL}/readyz").is_success
    except httpx.TransportError:
        return False


@contextmanager
def load(keys: dict[str, str]) -> Iterator[None]:
    """Two clients of each tenant send chats. A few of them name a model that does not exist."""
    is_over = threading.Event()
    described = json.loads((DEMO / "demo.json").read_text(encoding="utf-8"))["adapters"]
    prompts = [one["prompt"] for one in described.values() if one["prompt"]]

    def chat(key: str) -> None:
        with httpx.Client(base_url=URL, headers={"Authorization": f"Bearer {key}"}, timeout=120) as client:
            while not is_over.wait(random.random() * 12):
                messages = [{"role": "user", "content": random.choice(prompts)}]
                model = "default" if random.random() < 0.97 else "nobody"
                body = {"model": model, "messages": messages, "max_tokens": random.randint(20, 80)}
                client.post("/v1/chat/completions", json=body)

    threads = [threading.Thread(target=chat, args=(key,)) for key in keys.values() for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@contextmanager
def console(browser: Browser, key: str, theme: str, size: tuple[int, int]) -> Iterator[Page]:
    width, height = size
    context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": height})
    page = context.new_page()
    page.goto(f"{URL}/console#key={key}")
    page.get_by_role("navigation").wait_for()
    yield page
    context.close()


def save(page: Page, view: str, name: str) -> None:
    page.goto(f"{URL}/console#/{view}")
    page.locator(".chart svg").first.wait_for()
    page.wait_for_timeout(1000)
    write(page, name)


def write(page: Page, name: str) -> None:
    path = IMAGES / f"console-{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size <= MAX_BYTES, f"{path} has {path.stat().st_size} bytes"


def make_tenant() -> str:
    """Creates a tenant with several adapters, one of which has two versions. Returns its key."""
    with httpx.Client(base_url=URL, timeout=120) as client:
        client.headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        client.post("/admin/tenants", json={"name": TENANT}).raise_for_status()
        quota = {"tokens_per_minute": 50_000, "tokens_per_month": 20_000}
        client.patch(f"/admin/tenants/{TENANT}/quota", json=quota).raise_for_status()
        key: str = client.post(f"/admin/tenants/{TENANT}/keys", json={"name": "console"}).json()["key"]
        client.headers["Authorization"] = f"Bearer {key}"
        for name, source in (("reply", "labels"), ("reply", "voice"), ("orders", "extract")):
            parts = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
            files = {field: (ADAPTERS / source / file).read_bytes() for field, file in parts.items()}
            client.post("/v1/adapters", data={"name": name}, files=files).raise_for_status()
        move = {"versions": {"1": 90, "2": 10}}
        client.put("/v1/adapters/reply/aliases/prod", json=move).raise_for_status()
        messages = [{"role": "user", "content": "How long does delivery take?"}]
        for model in ["reply@prod"] * 20 + ["orders"] * 10:
            body = {"model": model, "messages": messages, "max_tokens": 50}
            client.post("/v1/chat/completions", json=body).raise_for_status()
    return key


def upload(page: Page) -> None:
    """Uploads an adapter, and shows its certificate."""
    page.goto(f"{URL}/console#/adapters")
    page.get_by_text("Drop the folder").wait_for()
    page.get_by_label("Files of the adapter").set_input_files(sorted((ADAPTERS / "sql").iterdir()))
    page.get_by_label("Name of the adapter").fill("sql")
    page.get_by_role("button", name="Upload").click()
    page.get_by_role("heading", name="Certificate").wait_for()


def ask(page: Page) -> None:
    """Sends a prompt in the playground."""
    page.goto(f"{URL}/console#/playground")
    page.get_by_label("Answer of reply").wait_for()
    page.get_by_label("User").fill(
        "Ada Berg from Oslo here. Please send me 3 desk lamps. How long does delivery take?"
    )
    page.get_by_role("button", name="Send").click()
    for answer in page.locator(".answer").all():
        answer.get_by_text("complete", exact=True).wait_for()


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, demo(directory) as keys, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        with (
            load(keys),
            console(browser, ADMIN_KEY, "light", WIDE) as light,
            console(browser, ADMIN_KEY, "dark", WIDE) as dark,
            console(browser, keys["voice"], "light", NARROW) as narrow,
        ):
            for page in (light, dark, narrow):
                page.goto(f"{URL}/console#/pool")
            time.sleep(WATCHED_S)
            save(light, "health", "health-light")
            save(light, "pool", "pool-light")
            save(dark, "pool", "pool-dark")
            save(light, "traffic", "traffic-light")
            save(dark, "traffic", "traffic-dark")
            save(narrow, "pool", "pool-narrow")
        key = make_tenant()
        with (
            console(browser, key, "light", WIDE) as light,
            console(browser, key, "light", NARROW) as narrow,
            console(browser, ADMIN_KEY, "dark", WIDE) as dark,
        ):
            upload(light)
            write(light, "adapters")
            ask(light)
            write(light, "playground")
            narrow.goto(f"{URL}/console#/adapters/reply")
            narrow.get_by_text("prod 10 %").wait_for()
            write(narrow, "adapter-narrow")
            dark.goto(f"{URL}/console#/tenants/{TENANT}")
            dark.locator(".usage-chart svg").wait_for()
            dark.wait_for_timeout(1000)
            write(dark, "tenant")
        browser.close()


if __name__ == "__main__":
    main()
