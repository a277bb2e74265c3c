"""Contexts of a listener, in this process: what is served, to whom, and after a change."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common import tls
from services.common.errors import StartupError
from services.common.tls import NO_TLS, TlsFiles
from tests.certificates import Authority


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (TlsFiles(cert="c"), "--tls-cert and --tls-key need each other"),
        (TlsFiles(key="k"), "need each other"),
        (TlsFiles(ca="a"), "--tls-ca needs --tls-cert"),
    ],
)
def test_half_a_side_is_refused(files: TlsFiles, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        files.check()


def test_a_side_that_connects_may_be_nameless() -> None:
    TlsFiles(ca="a").check("--peer-tls", listens=False)
    NO_TLS.check()
    with pytest.raises(ValueError, match="--peer-tls-server-name needs"):
        TlsFiles(server_name="n").check("--peer-tls", listens=False)


@pytest.mark.parametrize("content", [b"", b"no certificate"])
def test_bad_files_are_named(tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_bytes(content)
    good = Authority.make(tmp_path).issue("good")
    for files in (
        TlsFiles(str(bad), good.key),
        TlsFiles(good.cert, str(bad)),
        TlsFiles(good.cert, good.key, str(bad)),
        TlsFiles(good.cert, Authority.make(tmp_path, "x").issue("other").key),
    ):
        for make in (tls.server_context, tls.reloading_context, tls.server_credentials):
            with pytest.raises(StartupError, match=r"cannot use .*\.pem|cannot use .*other\.key"):
                make(files)


@asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server that says hello over TLS; yields its port."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _hello(port: int, ca: str, mine: TlsFiles = NO_TLS, host: str = "localhost") -> bool:
    context = ssl.create_default_context(cafile=ca)
    if mine:
        context.load_cert_chain(mine.cert, mine.key)
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        found = await reader.read()  # a refusal may come after our side of the handshake
        writer.close()
    except (ssl.SSLError, ConnectionError):
        return False
    return found == b"hello"


async def test_client_certificates_and_a_new_authority(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second = Authority.make(tmp_path, "first"), Authority.make(tmp_path, "second")
    files = first.issue("server")
    friend, stranger = first.issue("friend"), second.issue("stranger")
    expired = first.issue("expired", expired=True)
    async with listening(tls.reloading_context(files)) as port:
        assert await _hello(port, first.ca, friend)
        for other in (NO_TLS, stranger, expired):
            assert not await _hello(port, first.ca, other)
        assert "refused a client's TLS handshake" in caplog.text
        reasons = {getattr(record, "reason", "") for record in caplog.records}
        assert {"certificate has expired", "PEER_DID_NOT_RETURN_A_CERTIFICATE"} <= reasons
        # The authority is replaced, and with it who may come.
        fresh = second.issue("server")
        shutil.copy(second.ca, first.ca)
        assert fresh.cert == files.cert
        for host in ("localhost", "127.0.0.1"):  # an address is not named in a handshake
            assert await _hello(port, second.ca, stranger, host)
            assert not await _hello(port, second.ca, friend, host)
