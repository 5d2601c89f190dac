"""What the endpoints count, for Prometheus: in the API server's process."""

from __future__ import annotations

from fastapi import Request, Response
from prometheus_client import Counter

# No name starts with "vllm:", because vLLM takes back all that does when it starts an engine.
REQUESTS = Counter(
    "blockattn_requests",
    "Requests to the endpoints of block mode, by path and HTTP status; streams as they begin.",
    ["path", "status"],
)
RETRIES = Counter(
    "blockattn_retries", "Requests that were asked anew, because their blocks were lost meanwhile."
)
CUT_ANSWERS = Counter(
    "blockattn_cut_answers",
    "Answers in block mode that a stop string ended, which the engine itself does not count.",
)


def counted(raw_request: Request, response: Response) -> Response:
    """The response, which is counted."""
    REQUESTS.labels(raw_request.url.path, str(response.status_code)).inc()
    return response
