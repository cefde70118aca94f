"""Records real vLLM's response to every request of ``fakes.api_table``.

Usage: ``python tests/tools/record_api_answers.py URL > tests/processes/simulated/vllm-0.32-answers.json`` with the URL
of a server of the tiny model that was started with ``--served-model-name tiny --max-model-len 512``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.api_table import TABLE, WARM_UP, Answer, send

LONGEST = 20_000
"""Number of characters kept of a body that is not compared literally."""


def main() -> int:
    """Send the table to the server and write the responses as JSON."""
    url = sys.argv[1].rstrip("/")
    with httpx.Client(trust_env=False, timeout=120) as client:
        send(client, url, WARM_UP)
        root = client.get(f"{url}/v1/models").json()["data"][0]["root"]
        answers = {}
        for case in TABLE:
            answer = send(client, url, case)
            body = _kept(answer).replace(root, "/models/tiny")
            headers = {name: value.replace(url, "http://127.0.0.1:8000") for name, value in answer.headers.items()}
            answers[case.name] = {"status": answer.status, "headers": headers, "body": body}
    json.dump(answers, sys.stdout, indent=1, ensure_ascii=False, sort_keys=True)
    sys.stdout.write("\n")
    return 0


def _kept(answer: Answer) -> str:
    """A body reduced to what is compared: the paths of the API description, the beginning of metrics."""
    if not answer.headers.get("content-type", "").startswith("application/json"):
        return answer.body[:LONGEST]
    if '"openapi"' not in answer.body[:20]:
        return answer.body
    document = json.loads(answer.body)
    document["paths"] = {path: dict.fromkeys(methods) for path, methods in document["paths"].items()}
    document["components"] = {}
    return json.dumps(document)


if __name__ == "__main__":
    sys.exit(main())
