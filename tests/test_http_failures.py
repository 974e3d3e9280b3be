"""How an error names a request that did not reach its server."""

from __future__ import annotations

import httpx
import pytest

from eagle_plugin.common.http_failures import PROXIES, describe_failure
from eagle_plugin.learning.deploy.counts import CountsError, served_counts


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize("address", ["127.0.0.1:30000", "localhost:30000", "server", "htp://server"])
def test_an_address_without_http(address: str) -> None:
    with pytest.raises(CountsError, match="begin the address with http://"):
        served_counts(address)


@pytest.mark.parametrize("kind", [httpx.ConnectError, httpx.ConnectTimeout])
def test_a_proxy_that_is_not_used_is_named(kind: type[httpx.RequestError], monkeypatch: pytest.MonkeyPatch) -> None:
    far = kind("refused", request=httpx.Request("GET", "http://server.example:8000"))
    near = kind("refused", request=httpx.Request("GET", "http://127.0.0.1:8000"))
    assert "proxy" not in describe_failure(far)
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy.example")
    told = describe_failure(far)
    assert told.endswith("; HTTPS_PROXY is set, and no proxy is used for requests to servers") and "secret" not in told
    assert "proxy" not in describe_failure(near) and "proxy" not in describe_failure(kind("without a request"))
