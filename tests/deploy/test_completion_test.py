"""The script behind `helm test`, against a gateway that behaves and against others."""

from __future__ import annotations

import importlib.util
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from services.common.tls import server_context
from tests.certificates import Authority
from tests.deploy.charts import CHART, Helm, Render


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = CHART / "files" / "completion_test.py"
    spec = importlib.util.spec_from_file_location("completion_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _chunk(text: str | None, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}


def _usage(prompt: int, completion: int, total: int) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": total,
        },
    }


GOOD = [_chunk(""), _chunk("Par"), _chunk("is", "stop"), _usage(37, 2, 39)]


def _data(events: list[dict[str, Any]], done: bool = True) -> list[str]:
    return [*(json.dumps(event) for event in events), *(["[DONE]"] if done else [])]


WHOLE = {"choices": [{"message": {"content": "Paris"}}], "usage": _usage(37, 2, 39)["usage"]}
STREAM = "".join(f"data: {item}\n\n" for item in _data(GOOD)).encode()


def test_a_good_stream_passes(script: ModuleType) -> None:
    assert script.check(_data(GOOD)) == "Paris"


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ([], "DONE"),
        (_data(GOOD, done=False), "DONE"),
        (_data([*GOOD[:2], {"error": {"message": "lost"}}]), "lost"),
        (_data([GOOD[0], GOOD[3]]), "finish_reason"),
        (_data([*GOOD[:3], GOOD[2], GOOD[3]]), "finish_reason"),
        (_data(GOOD[:3]), "usage"),
        (_data([*GOOD[:3], _usage(37, 2, 40)]), "usage is wrong"),
        (_data([*GOOD[:3], _usage(37, 0, 37)]), "usage is wrong"),
    ],
)
def test_a_bad_stream_is_named(script: ModuleType, data: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        script.check(data)


@contextmanager
def _gateway(
    status: int,
    body: bytes,
    *,
    tls: ssl.SSLContext | None = None,
    asked: list[tuple[str, str | None]] | None = None,
    whole: bytes = json.dumps(WHOLE).encode(),
) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked is not None:
                asked.append((request.get("model", ""), self.headers["Authorization"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if request["stream"] or status != 200 else whole)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Stays quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_over_http(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with _gateway(200, STREAM) as url:
        assert script.main(url, 5) == 0
    assert "the model streamed: 'Paris'" in capsys.readouterr().out
    with _gateway(503, b'{"error": {"message": "no worker is ready"}}') as url:
        assert script.main(url, 5) == 1
    assert "no worker is ready" in capsys.readouterr().out
    assert script.main("http://127.0.0.1:1", 5) == 1


def test_each_model_streams_one_leaves_one_and_asks_for_a_whole(script: ModuleType) -> None:
    asked: list[tuple[str, str | None]] = []
    with _gateway(200, STREAM, asked=asked) as url:
        assert script.main(url, 5, ["chat", "code"]) == 0
    assert [model for model, _ in asked] == ["chat"] * 3 + ["code"] * 3


@pytest.mark.parametrize(
    ("whole", "complaint"),
    [
        ({**WHOLE, "usage": _usage(37, 0, 37)["usage"]}, "usage is wrong"),
        ({**WHOLE, "choices": [{"message": {"content": ""}}]}, "no text"),
    ],
)
def test_a_bad_whole_answer_is_named(
    script: ModuleType, whole: dict[str, Any], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _gateway(200, STREAM, whole=json.dumps(whole).encode()) as url:
        assert script.main(url, 5) == 1
    assert complaint in capsys.readouterr().out


def test_over_tls_with_a_key(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what a gateway's pod has mounted, clients' certificates required."""
    public, keys = tmp_path / "public-tls", tmp_path / "api-keys"
    public.mkdir()
    keys.mkdir()
    files = Authority.make(tmp_path).issue("tls")
    for name, source in (("tls.crt", files.cert), ("tls.key", files.key), ("ca.crt", files.ca)):
        (public / name).write_bytes(Path(source).read_bytes())
    (keys / "keys").write_text("# people\n\nalice:sk-alice\nsk-2\n")
    asked: list[tuple[str, str | None]] = []
    with _gateway(200, STREAM, tls=server_context(files), asked=asked) as url:
        assert script.main(url, 20, secrets=tmp_path) == 0, capsys.readouterr().out
    assert {key for _, key in asked} == {"Bearer sk-alice"}
    assert script.first_key("sk-2") == "sk-2"
    assert script.first_key("a/b:sk-3") == "a/b:sk-3", "no name, as the gateway reads it"


def test_the_pod_names_every_model(helm: Helm) -> None:
    render = helm.template([CHART.parent / "examples" / "several-models.yaml"])
    (container,) = render.one("Pod", "shoal-test")["spec"]["containers"]
    assert container["args"][3:] == ["chat", "code"]


def test_the_pod_runs_the_script_against_the_gateway(default: Render) -> None:
    pod = default.one("Pod", "shoal-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    source, url, timeout = container["args"]
    compile(source, "completion_test.py", "exec")
    assert source.rstrip() == (CHART / "files" / "completion_test.py").read_text().rstrip()
    assert (url, timeout) == ("http://shoal-gateway:8000", "120")
