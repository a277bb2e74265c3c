"""`shoal top` against a gateway of two answers, on a pseudo-terminal and without one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from services.client.top.__main__ import main
from tests.client.terminal import Terminal
from tests.client.top.fleets import FLEET


class Gateway(ThreadingHTTPServer):
    """Answers GET /fleet with `answer`, to whoever has the key."""

    answer = (200, msgspec.json.encode(FLEET))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Gateway)
        status, body = self.server.answer
        if self.path != "/fleet":
            status, body = 404, b"{}"
        elif self.headers.get("Authorization") != "Bearer right":
            status, body = 401, b'{"error": {"message": "the API key is wrong"}}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    server = Gateway(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Status, stdout and stderr of `shoal top` with some flags, without a terminal."""

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(words)
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return call


def test_once_json_is_what_the_gateway_said(gateway: Gateway, run: Run) -> None:
    status, out, err = run("--url", gateway.url, "--api-key", "right", "--once", "--json")
    assert (status, err) == (0, "")
    (line,) = out.splitlines()
    assert json.loads(line) == msgspec.to_builtins(FLEET)


def test_without_a_terminal_there_is_one_table(gateway: Gateway, run: Run) -> None:
    status, out, err = run("--url", gateway.url, "--api-key", "right", "--sort", "state")
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert out.splitlines()[5].split()[:3] == ["worker", "unix:/w1", "dead"]


@pytest.mark.parametrize(
    ("answer", "key", "sentence"),
    [
        (None, "wrong", "the API key is wrong"),
        ((404, b""), "right", "is not a Shoal gateway"),
        ((200, b"[]"), "right", "is not a fleet that this version knows"),
    ],
)
def test_no_fleet_is_one_sentence(
    gateway: Gateway, run: Run, answer: tuple[int, bytes] | None, key: str, sentence: str
) -> None:
    gateway.answer = answer or gateway.answer
    status, out, err = run("--url", gateway.url, "--api-key", key)
    assert (status, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("shoal: ")
    assert sentence in line


def test_nobody_there_is_one_sentence(run: Run) -> None:
    status, _, err = run("--url", "http://127.0.0.1:9")
    assert status == 1
    assert err == "shoal: nothing answers at http://127.0.0.1:9/fleet (ConnectError)\n"


def test_keys_sort_and_filter_and_q_leaves(gateway: Gateway) -> None:
    words = ("top", "--url", gateway.url, "--api-key", "right", "--interval", "0.1")
    with Terminal(*words) as terminal:
        place = terminal.expect("sort by service")
        terminal.send("s")
        place = terminal.expect("sort by state", after=place)
        terminal.send("fff")
        place = terminal.expect("show detokenizer", after=place)
        gateway.answer = (503, b'{"error": {"message": "the gateway drains"}}')
        place = terminal.expect("the gateway drains; what is shown is old", after=place)
        gateway.answer = Gateway.answer
        terminal.send("f")
        terminal.expect("unix:/t0", after=place)
        terminal.send("q")
        assert terminal.end() == 0
