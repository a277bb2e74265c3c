"""A mistake at the start of any service is one sentence that says what to do, and status 1 or 2."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common import logs

# {port} is taken, {dir} empty.
MISTAKES: list[tuple[str, int, str]] = [
    ("gateway --port {port} --grpc-port 0", 1, "port {port} on 127.0.0.1 is in use; choose"
     " another with --port"),
    ("gateway --port 0 --grpc-port {port}", 1, "port {port} on 127.0.0.1 is in use; choose"
     " another with --grpc-port"),
    ("gateway --port 99999", 2, "--port 99999 is out of range: 0 to 65535"),
    ("gateway --port 8001", 2, "--port and --grpc-port are both 8001"),
    ("gateway --host 192.0.2.1 --port 0 --grpc-port 0", 1, "192.0.2.1 is not an address of this"
     " machine; choose another with --host"),
    ("gateway --worker-addresses here", 1, "peer address 'here' is not host:port,"),
    ("gateway --worker-addresses k8s:a/b:c", 1, "k8s: addresses work only in a pod"),
    ("gateway --port 0 --grpc-port 0 --model {dir}/no.gguf", 1, "no.gguf does not exist"),
    ("gateway --api-key-file {dir}/keys", 1, "cannot read --api-key-file {dir}/keys"),
    ("gateway --admin-address 127.0.0.1:{port}", 1, "choose another with --admin-address"),
    ("gateway --admin-address here", 1, "--admin-address 'here' is not host:port or unix:/path"),
    ("gateway --tls-cert {dir}/cert.pem", 2, "--tls-cert and --tls-key need each other"),
    ("gateway --tenant-weights a", 2, "--tenant-weights 'a' is not name=weight"),
    ("tokenizer --address 127.0.0.1:{port}", 1, "choose another with --address"),
    ("tokenizer --address here", 1, "--address 'here' is not host:port or unix:/path"),
    ("tokenizer --address nonesuch.invalid:0", 1, "there is no host 'nonesuch.invalid'"),
    ("tokenizer --address 127.0.0.1:0 --model {dir}", 1, "model directory {dir} has no config"),
    ("tokenizer --address 127.0.0.1:0 --model /etc/passwd", 1, "is a file, but not a .gguf file"),
    ("tokenizer --address 127.0.0.1:0 --model no/such", 1, "cannot be had from the hub"),
    ("detokenizer --address unix:{dir}/no/x.sock", 1, "there is no directory {dir}/no"),
    ("detokenizer --address unix:{dir}/{long}", 1, "is too long for a unix socket: 107 bytes"),
    ("worker --address 127.0.0.1:{port} --engine fake", 1, "choose another with --address"),
    ("worker --model byte", 1, "the model 'byte' has no weights; run it with --engine fake"),
    ("worker --model {dir}/none", 1, "model {dir}/none does not exist"),
    ("worker --tp 7", 1, "the model has 9 attention heads, which cannot be divided over --tp 7"),
    ("worker --tp 3 --nnodes 2", 2, "--tp 3 cannot be shared by --nnodes 2 hosts"),
    ("worker --page-size 3", 2, "--page-size 3 is not a power of two"),
    ("worker --device cpu --attention-backend flashinfer", 2, "needs --device cuda"),
    ("worker --engine fake --tls-cert {dir}/c --tls-key {dir}/k", 1, "cannot use {dir}/c"),
    ("serve --port {port}", 1, "port {port} on 127.0.0.1 is in use; choose another with --port"),
    ("serve --port {port} --grpc-port {other}", 1, "port {other} on 127.0.0.1 is in use; choose"),
    ("serve --run-dir {port}/x --port 0 --tokenizers 0", 2, "--tokenizers 0 is out of range: at"),
    ("serve --run-dir /proc/none --port 0 --grpc-port 0", 1, "cannot use --run-dir /proc/none"),
    ("serve extra", 2, "unrecognized arguments: extra"),
]  # fmt: skip


@pytest.fixture(scope="module")
def taken() -> Iterator[tuple[int, int]]:
    """Two ports."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        yield one.getsockname()[1], other.getsockname()[1]


@pytest.mark.parametrize(("line", "status", "said"), MISTAKES)
def test_a_mistake_is_one_sentence(
    line: str,
    status: int,
    said: str,
    taken: tuple[int, int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "setup", lambda *args, **kwargs: None)  # stderr is for the sentence
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    port, other = map(str, taken)
    words = {"port": port, "other": other, "dir": str(tmp_path), "long": "x" * 120}
    name, *argv = line.format(**words).split()
    modules = {"serve": "fleet", "detokenizer": "tokenizer"}
    main = importlib.import_module(f"services.{modules.get(name, name)}.__main__").main
    with pytest.raises(SystemExit) as end:
        main(argv, role=name) if name == "detokenizer" else main(argv)
    out, err = capfd.readouterr()
    assert end.value.code == status
    assert out == ""
    (sentence,) = err.splitlines()
    assert sentence.startswith("shoal")
    assert said.format(**words) in sentence
