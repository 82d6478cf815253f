"""Soak test of `vitrail serve`: many clients for some minutes, and the memory of the server meanwhile.

    python perf/serve_soak.py --minutes 10 --clients 200

Clients ask with images, stream, ask for JSON of a schema, and some disconnect. The script prints the statuses, the
requests that were lost, and the resident memory of the server every tenth of the time.
"""

import argparse
import base64
import collections
import http.client
import io
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from PIL import Image

SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["count"],
    "additionalProperties": False,
}


def build_image(number: int) -> str:
    file = io.BytesIO()
    Image.effect_mandelbrot((48, 48), (-2, -1.5, 1 + number / 10, 1.5), 20).convert("RGB").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


IMAGES = [build_image(number) for number in range(8)]


def build_body(rng: random.Random, model: str, client: int) -> dict:
    parts: list = [{"type": "text", "text": f"how many {rng.choice(['dogs', 'lamps', 'cubes'])}?"}]
    if rng.random() < 0.3:
        parts.insert(0, {"type": "image_url", "image_url": {"url": rng.choice(IMAGES)}})
    body = {"model": model, "messages": [{"role": "user", "content": parts}], "user": str(client)}
    body |= {"max_tokens": rng.randint(1, 12), "stream": rng.random() < 0.5, "temperature": rng.choice([0, 1])}
    if rng.random() < 0.2:
        schema = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}}
        body |= {"response_format": schema, "max_tokens": 100}
    return body


def run_client(port: int, model: str, number: int, end: float, counts: collections.Counter) -> None:
    """Send requests one after another until the end. A request is lost if it has no complete answer."""
    rng = random.Random(number)
    while time.monotonic() < end:
        body, disconnects = build_body(rng, model, number), rng.random() < 0.05
        try:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            link.request("POST", "/v1/chat/completions", json.dumps(body))
            if disconnects:
                time.sleep(rng.random() / 5)
                link.close()
                counts["disconnected by the client"] += 1
                continue
            answer = link.getresponse()
            data = answer.read()
            link.close()
            complete = data.endswith(b"data: [DONE]\n\n") if body["stream"] else "choices" in json.loads(data)
            counts[f"status {answer.status}"] += 1
            counts["lost"] += answer.status == 200 and not complete
        except (OSError, ValueError, http.client.HTTPException):
            counts["lost"] += 1


def read_memory(process: int) -> float:
    """Return the resident memory of a process in MB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1000 if found else 0.0


def read_metric(port: int, name: str) -> list[str]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request("GET", "/metrics")
    text = link.getresponse().read().decode()
    link.close()
    return re.findall(rf"^vitrail_{name}{{.*?}} (\S+)$", text, re.M)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="mini-vlm")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=200)
    given = parser.parse_args()
    command = [sys.executable, "-m", "vitrail", "serve", given.model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().split("/v1")[0].rsplit(":", 1)[1])
        model = server.stdout.readline().split(":")[0].strip().split(", ")[0]
        started, counts = time.monotonic(), collections.Counter()
        end = started + given.minutes * 60
        clients = [
            threading.Thread(target=run_client, args=(port, model, number, end, counts))
            for number in range(given.clients)
        ]
        for thread in clients:
            thread.start()
        memory = []
        for step in range(1, 11):
            time.sleep(max(0, started + given.minutes * 6 * step - time.monotonic()))
            memory.append(round(read_memory(server.pid)))
            print(
                f"{given.minutes * step / 10:g} min: {memory[-1]:,} MB, {sum(counts.values()):,} requests", flush=True
            )
        for thread in clients:
            thread.join()
        deadline = time.monotonic() + 30
        while read_metric(port, "num_running") != ["0"] and time.monotonic() < deadline:
            time.sleep(0.1)
        print(f"{given.clients} clients, {time.monotonic() - started:.0f} s: {dict(counts)}")
        print(f"pages in use: {read_metric(port, 'pages_used')}; memory in MB: {memory}")
        server.terminate()
        print(f"exit status after SIGTERM: {server.wait(60)}")
    if counts["lost"] or any(name.startswith("status") and name != "status 200" for name in counts):
        raise SystemExit("requests were lost or refused")


if __name__ == "__main__":
    main()
