"""The routes alone, over a service that fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from blockattn_rag.errors import BlockAttnError, MissError, ProtocolError, StoreError
from blockattn_rag.serving.endpoint import ENCODE
from blockattn_rag.vllm.routes import router

BODY = {"blocks": [[1, 2, 3]]}


class FailingService:
    """A service that fails with one error."""

    def __init__(self, error: BlockAttnError) -> None:
        self._error = error

    async def encode(self, body: Any, headers: Any) -> Any:
        raise self._error


def refusal(error: BlockAttnError) -> tuple[int, dict[str, Any]]:
    """Status and error of the answer when a service fails so."""
    app = FastAPI()
    app.include_router(router)
    app.state.blockattn = FailingService(error)
    app.state.server_load_metrics = 0
    answer = TestClient(app).post(ENCODE, json=BODY)
    told: dict[str, Any] = answer.json()["error"]
    return answer.status_code, told


@pytest.mark.parametrize(
    ("error", "status"), [(ProtocolError("no block"), 400), (MissError("block 3"), 409)]
)
def test_a_refusal_says_what_is_wrong_with_the_request(error: BlockAttnError, status: int) -> None:
    found, told = refusal(error)
    assert (found, told["message"]) == (status, str(error))
    assert told["type"] == type(error).__name__


def test_what_a_store_says_of_its_place_is_logged_and_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = "/srv/tenants/kv of key 3f2a"
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        status, told = refusal(StoreError(f"cannot read {place}"))
    assert (status, told["type"]) == (503, "StoreError")
    assert "cannot be used" in told["message"]
    assert place not in str(told)
    assert place in caplog.text
