"""What the doctor says of machines, models and fleets that are well, and of those that are not."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from protos import worker_pb2, worker_pb2_grpc
from services import __version__
from services.client.doctor import machine
from services.client.doctor.__main__ import main
from services.client.doctor.config import DoctorConfig
from services.client.doctor.finding import Finding
from services.client.doctor.model import check_model
from services.client.doctor.peers import check_fleet
from services.client.doctor.ports import check_ports
from services.common import rpc
from services.common.tls import NO_TLS, TlsFiles
from tests.certificates import Authority
from tests.worker.models.checkpoints import save_tiny


class Worker(worker_pb2_grpc.WorkerServicer):
    """Says who it is."""

    def __init__(self) -> None:
        self.version = __version__

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: object
    ) -> worker_pb2.GetInfoResponse:
        info = worker_pb2.WorkerInfo(epoch=1, version=self.version)
        return worker_pb2.GetInfoResponse(info=info)


async def _fleet(**options: object) -> list[Finding]:
    config = DoctorConfig(**options)  # type: ignore[arg-type]
    return [finding async for finding in check_fleet(config)]


async def _serve(files: TlsFiles = NO_TLS) -> AsyncIterator[tuple[Worker, str]]:
    server, worker = rpc.Server(["shoal.v1.Worker"]), Worker()  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc)
    address = await server.start("127.0.0.1:0", files)
    await server.set_serving(True)
    yield worker, address
    await server.stop(0)


async def test_a_peer_that_is_well_and_one_that_is_older() -> None:
    async for worker, address in _serve():
        findings = await _fleet(workers=(address,))
        assert [finding.level for finding in findings] == ["ok", "ok"]
        worker.version = "0.0.1"
        *_, version = await _fleet(workers=(address,))
        assert version.level == "warning"
        assert "runs 0.0.1" in version.text
        (wrong, *_) = await _fleet(tokenizers=(address,))
        assert (wrong.level, wrong.check) == ("problem", "tokenizer")
        assert "no such service" in wrong.text


async def test_peers_that_are_not_there() -> None:
    findings = await _fleet(
        workers=("127.0.0.1:9", "unix:/nonesuch"), url="http://127.0.0.1:9", timeout=2.0
    )
    assert [finding.level for finding in findings] == ["problem"] * 3
    assert all("is it running" in finding.text for finding in findings)


@pytest.mark.parametrize("body", ["<html>Welcome</html>", "[]", "\xff"])
async def test_a_server_that_is_no_gateway(body: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body.encode("latin-1"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        *_, last = await _fleet(url=f"http://127.0.0.1:{port}")
    assert (last.check, last.level) == ("gateway", "warning")
    assert "is no gateway of Shoal: /server_info is no JSON object" in last.text


@pytest.mark.parametrize(
    ("fault", "level", "said"),
    [
        ("", "ok", "trusted as localhost"),
        ("stranger", "problem", "name the authority that signed it"),
        ("name", "problem", "issue it for that name"),
        ("expired", "problem", "renew it"),
        ("soon", "warning", "renew it"),
    ],
)
async def test_certificates(tmp_path: Path, fault: str, level: str, said: str) -> None:
    authority = Authority.make(tmp_path)
    days = {"expired": -1, "soon": 5}.get(fault, 90)
    ours = authority.issue("worker", days=days)
    trusted = Authority.make(tmp_path, "stranger").ca if fault == "stranger" else authority.ca
    async for _, address in _serve(TlsFiles(cert=ours.cert, key=ours.key)):
        findings = await _fleet(
            workers=(address,),
            peer_tls_ca=trusted,
            peer_tls_server_name="other" if fault == "name" else "localhost",
        )
        (tls,) = [f for f in findings if f.check == "TLS" and address in f.text]
        assert (tls.level, said in tls.text) == (level, True), tls
        if level != "problem":
            assert findings[-1].check == "version"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--url", "http://h:x"], "--url 'http://h:x' is no URL"),
        (["--url", "localhost"], "does not start with http:// or https://"),
        (["--header", "bad"], "--header 'bad' is not of the form"),
    ],
)
def test_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_models(tmp_path: Path) -> None:
    levels = {finding.check: finding.level for finding in check_model("")}
    expected = ("model", "weights", "tokenizer", "chat template")
    assert levels == dict.fromkeys(expected, "ok")
    (missing,) = check_model("/nonesuch")
    assert missing == Finding("model", "problem", "model /nonesuch does not exist")
    save_tiny(tmp_path, "llama", shard="100KB")
    *_, tokenizer = check_model(str(tmp_path))
    assert (tokenizer.check, tokenizer.level) == ("tokenizer", "problem")  # it has none
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    weights = list(check_model(str(tmp_path)))[1]
    assert weights.level == "problem"
    assert shard.name in weights.text


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (finding,) = check_ports("127.0.0.1", {"--port": port, "--grpc-port": -1})
    assert finding.level == "warning"
    assert finding.text.startswith(f"port {port} on 127.0.0.1 is in use")


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["grpcio>=1.85", "rich>=14", 'torch==2.13.0; extra == "worker"', 'a; extra == "dev"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    have = {"grpcio": "1.0", "rich": "14.1"}

    def version(name: str) -> str:
        if name not in have:
            raise PackageNotFoundError(name)
        return have[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    core, gateway, tokenizer, worker = machine.check_packages()
    assert core.level == "problem"
    assert "grpcio 1.0 where >=1.85 is needed" in core.text
    assert (gateway.level, tokenizer.level) == ("ok", "ok")
    assert worker.level == "warning"
    assert "torch missing" in worker.text


def test_an_import_of_torch_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ASK_TORCH", "import threading; threading.Event().wait()")
    monkeypatch.setattr(machine, "_TORCH_SECONDS", 0.1)
    (finding,) = machine.check_torch()
    assert (finding.check, finding.level) == ("torch", "problem")
    assert "does not end within 0.1 s" in finding.text


def test_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "check_torch", lambda: iter(()))  # seconds, in a process
    argv = ["--port", "0", "--grpc-port", "-1", "--model", "/nonesuch"]
    with pytest.raises(SystemExit) as end:
        main(argv)
    text, err = capsys.readouterr()
    assert (end.value.code, err) == (1, "")
    assert "PROBLEM  model          model /nonesuch does not exist" in text
    with pytest.raises(SystemExit):
        main([*argv, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found) == len(text.splitlines())
    assert {entry["level"] for entry in found} <= {"ok", "warning", "problem"}
    assert found[-1]["text"] == "model /nonesuch does not exist"
