"""Who may ask: names, pages, methods and tokens that are not ours are refused (W3, W4)."""

import asyncio
from typing import Any

import pytest

from preimage.errors import OptionError
from preimage.web.guard import Door, Guard
from preimage.web.options import ServeOptions
from support.serving import Answer, asked

HOST = ("host", "127.0.0.1:8765")
OWN = "http://127.0.0.1:8765"
TOKEN = "correct-horse-battery"


async def _inside(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def ask(
    *headers: tuple[str, str], method: str = "GET", path: str = "/", query: str = "", **door: Any
) -> Answer:
    guard = Guard(_inside, Door(**({"host": "127.0.0.1", "port": 8765, "token": None} | door)))
    return asked(guard, method, path, headers, query=query)


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:8765", "LOCALHOST:8765", "[::1]:8765"])
def test_its_own_names_are_let_in(host: str) -> None:
    answer = ask(("host", host), ("origin", f"http://{host.lower()}"), ("sec-fetch-site", "same-origin"))
    assert (answer.status, answer.body) == (200, b"inside")


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:8765", "127.0.0.1", "127.0.0.1:80", "127.0.0.1:8766", "127.0.0.2:8765",
     "127.0.0.1.evil.example:8765", "localhost.:8765", "127.1:8765", "2130706433:8765", "0.0.0.0:8765",
     "127.0.0.1:8765@evil.example", "127.0.0.1:8765 ", "127.0.0.1:8765, evil.example", "[::1", "[::1]8765"],
)  # fmt: skip
def test_other_names_are_refused(host: str) -> None:  # W4
    assert ask(("host", host)).status == 421


def test_no_name_and_two_names_are_refused() -> None:  # W4
    assert ask().status == 400
    assert ask(HOST, HOST).status == 421
    assert ask(HOST, ("Host", "evil.example")).status == 421


@pytest.mark.parametrize(
    "origin",
    ["null", "http://evil.example", "https://127.0.0.1:8765", "http://127.0.0.1:8766", "file://", "",
     "http://127.0.0.1:8765.evil.example", "http://localhost:8765"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_other_pages_are_refused(origin: str, method: str) -> None:  # W4
    assert ask(HOST, ("origin", origin), method=method).status == 403
    assert ask(HOST, ("origin", OWN), ("origin", origin), method=method).status == 403
    assert ask(HOST, ("origin", OWN), method=method).status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "anything"])
@pytest.mark.parametrize("mode", ["cors", "no-cors", "websocket"])
def test_other_sites_are_refused_by_what_the_browser_says_of_them(site: str, mode: str) -> None:  # W4
    assert ask(HOST, ("sec-fetch-site", site), ("sec-fetch-mode", mode)).status == 403
    assert ask(HOST, ("sec-fetch-site", site), method="POST").status == 403


def test_a_page_is_opened_by_who_types_its_address_but_not_from_other_sites() -> None:
    for site, status in {"none": 200, "same-origin": 200, "same-site": 200, "cross-site": 403}.items():
        headers = (HOST, ("sec-fetch-site", site), ("sec-fetch-mode", "navigate"), ("origin", "null"))
        assert ask(*headers).status == status
        assert ask(*headers, method="POST").status == 403


@pytest.mark.parametrize(
    "method", ["PUT", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "PROPFIND", "get", "X"]
)
def test_methods_that_are_not_listed_are_refused(method: str) -> None:  # W4
    answer = ask(HOST, method=method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, POST, DELETE"


def test_every_answer_has_its_headers_refusals_too() -> None:
    for answer in (ask(HOST), ask(("host", "evil.example"))):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "script-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"


# --- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [(), (("authorization", "Bearer wrong-token-here"),), (("authorization", TOKEN),),
     (("authorization", "Bearer "),), (("cookie", "preimage-8765=wrong"),),
     (("cookie", f"preimage-9999={TOKEN}"),), (("cookie", '\x00=;;="'),),
     (("authorization", f"Bearer {TOKEN}x"),), (("authorization", "Bearer t\xf6ken"),)],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/static/page.js", "/api/state", "/nothing"])
def test_with_a_token_every_request_needs_it(headers: tuple[tuple[str, str], ...], path: str) -> None:  # W3
    answer = ask(HOST, *headers, path=path, token=TOKEN)
    assert answer.status == 401
    assert TOKEN not in answer.body.decode() + str(answer.headers)


def test_a_token_comes_as_a_header_or_as_a_cookie_that_the_address_sets_once() -> None:
    assert ask(HOST, ("authorization", f"Bearer {TOKEN}"), token=TOKEN).status == 200
    assert ask(HOST, ("cookie", f"a=b; preimage-8765={TOKEN}"), token=TOKEN).status == 200
    answer = ask(HOST, query=f"token={TOKEN}", token=TOKEN)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert answer.headers["set-cookie"] == f"preimage-8765={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    assert ask(HOST, query="token=wrong", token=TOKEN).status == 401
    assert ask(HOST, query=f"token={TOKEN}&token=x", token=TOKEN).status == 401
    assert ask(HOST, query=f"token={TOKEN}", path="/api/state", token=TOKEN).status == 401
    assert ask(("host", "evil.example"), ("authorization", f"Bearer {TOKEN}"), token=TOKEN).status == 421


def test_on_all_addresses_it_answers_to_addresses_and_to_no_names() -> None:
    bearer = ("authorization", f"Bearer {TOKEN}")
    for host, status in {"192.168.1.7:8765": 200, "[fe80::1]:8765": 200, "evil.example:8765": 421}.items():
        assert ask(("host", host), bearer, host="0.0.0.0", token=TOKEN).status == status
    assert ask(("host", "box.lan:8765"), bearer, host="box.lan", token=TOKEN).status == 200


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.7", "box.lan", "127.1", "", "localhost.evil.example"]
)
def test_another_address_needs_a_token(host: str) -> None:  # W3
    with pytest.raises(OptionError, match="no token"):
        ServeOptions(host=host)
    assert ServeOptions(host=host, token=TOKEN).token == TOKEN


@pytest.mark.parametrize(
    "token", ["", "short", "with spaces in it", "line\nbreak-in-it", "x" * 201, "semi;colon;here"]
)
def test_tokens_that_cannot_be_kept_are_refused(token: str) -> None:
    with pytest.raises(OptionError, match="token cannot be used"):
        ServeOptions(token=token)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_this_machine_alone_needs_none(host: str) -> None:
    assert ServeOptions(host=host).is_loopback


def test_websockets_are_closed() -> None:
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    guard = Guard(_inside, Door("127.0.0.1", 8765, None))
    asyncio.run(guard({"type": "websocket", "headers": []}, receive, send))
    assert said == [{"type": "websocket.close", "code": 1008}]
