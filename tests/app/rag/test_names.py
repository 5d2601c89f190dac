from __future__ import annotations

from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants

from blockattn_rag.app.rag.names import loading


@pytest.mark.parametrize("is_reachable", [True, False])
def test_the_hub_is_probed_once_however_much_is_loaded(
    monkeypatch: pytest.MonkeyPatch, is_reachable: bool
) -> None:
    probed: list[str] = []

    def head(url: str, timeout: float) -> None:
        probed.append(url)
        if not is_reachable:
            raise httpx.ConnectError("refused")

    hub = f"http://hub/{is_reachable}"
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("some/model", "some/model", "other/model", "bundled"):  # as `ingest` does
        with loading(name):
            assert constants.HF_HUB_OFFLINE is (not is_reachable and name != "bundled")
        assert constants.HF_HUB_OFFLINE is False
    assert probed == [hub]
