"""guidellm: a benchmark of ten requests, none of which may fail. Its command is run as a user would run it."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

url, key = sys.argv[1:]
NUM_REQUESTS = 10

with TemporaryDirectory() as name:
    prompts, result = Path(name, "prompts.jsonl"), Path(name, "result.json")
    prompts.write_text(
        "".join(json.dumps({"prompt": f"question {one}"}) + "\n" for one in range(NUM_REQUESTS)),
        encoding="utf-8",
    )
    command = [
        str(Path(sys.executable).with_name("guidellm")),
        "run",
        f"--backend=kind=openai_http,target={url.removesuffix('/v1')},model=default,api_key={key}",
        "--profile=kind=concurrent,streams=2",
        f"--constraint=kind=max_requests,count={NUM_REQUESTS}",
        f"--data=kind=json_file,path={prompts}",
        f"--output=kind=json,path={result}",
        "--disable-console",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert ended.returncode == 0, ended.stderr
    (benchmark,) = json.loads(result.read_text(encoding="utf-8"))["benchmarks"]

made = benchmark["scheduler_metrics"]["requests_made"]
assert (made["successful"], made["errored"]) == (NUM_REQUESTS, 0), made
assert all(one["output_metrics"]["text_tokens"] > 0 for one in benchmark["requests"]["successful"])
