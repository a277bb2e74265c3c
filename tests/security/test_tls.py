"""TLS on every wire of a real fleet: streams go through it, and strangers are turned away."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
import httpx
import openai
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from services.common import rpc
from services.common.tls import NO_TLS, TlsFiles
from tests.certificates import SERVER_NAME, Authority
from tests.programs import eventually
from tests.security.services import ServiceProcess, TcpFleet

pytestmark = pytest.mark.integration

KEY = "a-key-that-nobody-may-read"


@dataclass
class Secured:
    """A fleet with mutual TLS between its services, and TLS towards its clients."""

    fleet: TcpFleet
    inside: Authority  # signs the services' certificates
    outside: Authority  # signs what clients see
    public: TlsFiles
    services: TlsFiles
    client: httpx.Client

    @property
    def base_url(self) -> str:
        port = self.fleet.gateway.endpoints["http"].rpartition(":")[2]
        return f"https://localhost:{port}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("certificates")
    inside, outside = Authority.make(directory, "inside"), Authority.make(directory, "outside")
    services, gateway = inside.issue("service"), inside.issue("gateway")
    public = outside.issue("public", with_ca=False)
    with TcpFleet(
        backend=(
            f"--tls-cert={services.cert}",
            f"--tls-key={services.key}",
            f"--tls-ca={services.ca}",
        ),
        gateway=(
            f"--tls-cert={public.cert}",
            f"--tls-key={public.key}",
            f"--peer-tls-cert={gateway.cert}",
            f"--peer-tls-key={gateway.key}",
            f"--peer-tls-ca={gateway.ca}",
            f"--peer-tls-server-name={SERVER_NAME}",
        ),
        env={"SHOAL_API_KEY": f"tester:{KEY}"},
    ) as fleet:
        port = fleet.gateway.endpoints["http"].rpartition(":")[2]
        context = ssl.create_default_context(cafile=outside.ca)
        with httpx.Client(
            base_url=f"https://localhost:{port}", verify=context, trust_env=False, timeout=30
        ) as client:
            fleet.wait_ready(client)
            yield Secured(fleet, inside, outside, public, services, client)


def test_openai_streams_over_tls(secured: Secured) -> None:
    context = ssl.create_default_context(cafile=secured.outside.ca)
    with openai.OpenAI(
        base_url=f"{secured.base_url}/v1",
        api_key=KEY,
        http_client=openai.DefaultHttpxClient(verify=context, trust_env=False),
    ) as client:
        stream = client.chat.completions.create(
            model="byte",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 20
    with (
        openai.OpenAI(
            base_url=f"{secured.base_url}/v1",
            api_key="wrong",
            http_client=openai.DefaultHttpxClient(verify=context, trust_env=False),
        ) as stranger,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        stranger.models.list()
    assert caught.value.code == "invalid_api_key"


async def test_the_public_grpc_api_over_tls(secured: Secured) -> None:
    port = secured.fleet.gateway.endpoints["grpc"].rpartition(":")[2]
    files = TlsFiles(ca=secured.outside.ca)
    async with rpc.open_channel(f"localhost:{port}", files) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        sampling = common_pb2.SamplingParams(max_tokens=20, ignore_eos=True)
        options = inference_pb2.GenerationOptions(sampling=sampling)
        request = inference_pb2.GenerateRequest(text="hi", options=options)
        metadata = (("authorization", f"Bearer {KEY}"),)
        call = stub.Generate(request, metadata=metadata, timeout=30)
        ids = [i async for answer in call for piece in answer.pieces for i in piece.token_ids]
        assert len(ids) == 20
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [answer async for answer in stub.Generate(request, timeout=30)]
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert await _asks(f"localhost:{port}", NO_TLS) is None


async def _asks(address: str, files: TlsFiles) -> health_pb2.HealthCheckResponse | None:
    """The health behind an address; None if the connection is not to be had."""
    async with rpc.open_channel(address, files) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer: health_pb2.HealthCheckResponse = await stub.Check(
                health_pb2.HealthCheckRequest(), timeout=20
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return None
            raise
        return answer


@pytest.mark.parametrize("role", ["tokenizer", "detokenizer", "worker"])
async def test_services_speak_to_their_own_alone(secured: Secured, role: str) -> None:
    service: ServiceProcess = getattr(secured.fleet, role)
    address = service.address
    mine = secured.inside.issue(f"friend-of-{role}")
    stranger = secured.outside.issue(f"stranger-to-{role}")
    expired = secured.inside.issue(f"expired-for-{role}", expired=True)
    assert await _asks(address, mine) is not None
    assert await _asks(address, NO_TLS) is None  # plain
    assert await _asks(address, TlsFiles(ca=mine.ca)) is None  # no certificate
    assert await _asks(address, replace(stranger, ca=mine.ca)) is None
    assert await _asks(address, expired) is None
    assert await _asks(address, replace(mine, ca=stranger.ca)) is None  # it is not the one we trust
    assert await _asks(address, replace(mine, server_name="other.test")) is None
    assert await _asks(address, mine) is not None
    service.wait_for_line("PEER_DID_NOT_RETURN_A_CERTIFICATE")
    service.wait_for_line("certificate has expired")
    assert service.process.poll() is None


def test_a_plain_http_client_is_refused(secured: Secured) -> None:
    plain = secured.base_url.replace("https", "http")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{plain}/livez", timeout=10)
    with pytest.raises(httpx.ConnectError):  # does not trust the certificate
        httpx.get(f"{secured.base_url}/livez", timeout=10)
    secured.fleet.gateway.wait_for_line("refused a client's TLS handshake")
    assert secured.client.get("/livez").status_code == 200


def _serial(address: str, *, files: TlsFiles | None = None) -> int:
    """The serial number of the certificate that a listener shows on a new connection."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if files is not None:
        context.load_cert_chain(files.cert, files.key)
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number


def _serial_in(files: TlsFiles) -> int:
    return x509.load_pem_x509_certificate(Path(files.cert).read_bytes()).serial_number


def test_rotated_certificates_are_used_by_new_connections(secured: Secured) -> None:
    friend = secured.inside.issue("rotating-friend")
    http = secured.fleet.gateway.endpoints["http"]
    assert _serial(http) == _serial_in(secured.public)
    secured.outside.issue("public", with_ca=False)
    secured.inside.issue("service")
    assert _serial(http) == _serial_in(secured.public)
    for service in secured.fleet.services[:3]:
        assert _serial(service.address, files=friend) == _serial_in(secured.services)
    assert secured.client.get("/readyz").status_code == 200


def test_a_broken_file_leaves_the_last_good_one_in_use(secured: Secured) -> None:
    http = secured.fleet.gateway.endpoints["http"]
    good = _serial_in(secured.public)
    path = Path(secured.public.cert)
    kept = path.read_bytes()
    path.write_bytes(b"no certificate")
    try:
        assert _serial(http) == good
        secured.fleet.gateway.wait_for_line("new TLS files are not used")
    finally:
        path.write_bytes(kept)


def test_a_gateway_that_is_not_trusted_says_so_and_lives(secured: Secured) -> None:
    stranger = secured.outside.issue("untrusted-gateway")
    with ServiceProcess(
        "gateway",
        *("--port=0", "--grpc-port=-1"),
        f"--tokenizer-addresses={secured.fleet.tokenizer.address}",
        f"--detokenizer-addresses={secured.fleet.detokenizer.address}",
        f"--worker-addresses={secured.fleet.worker.address}",
        f"--peer-tls-cert={stranger.cert}",
        f"--peer-tls-key={stranger.key}",
        f"--peer-tls-ca={secured.inside.ca}",
    ) as gateway:
        gateway.wait_for_line("cannot reach a peer")
        url = f"http://{gateway.endpoints['http']}"
        assert httpx.get(f"{url}/livez", timeout=10).status_code == 200
        assert httpx.get(f"{url}/readyz", timeout=10).status_code == 503
        lines = [line for line in gateway.log if "cannot reach a peer" in line]
        assert '"level": "warning"' in lines[0]
        assert gateway.stop() == 0


def test_a_missing_file_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    with ServiceProcess(
        "worker",
        "--model=byte",
        "--engine=fake",
        f"--tls-cert={tmp_path}/no",
        f"--tls-key={tmp_path}/no",
    ) as worker:
        eventually(lambda: worker.process.poll() is not None, timeout=60)
        assert worker.stop() == 1
        assert f"shoal: cannot use {tmp_path}/no" in worker.log[-1]
    with ServiceProcess("gateway", "--port=0", "--tls-cert=x") as gateway:
        eventually(lambda: gateway.process.poll() is not None, timeout=60)
        assert gateway.stop() == 2
        assert "--tls-cert and --tls-key need each other" in gateway.log[-1]


def test_no_key_is_in_a_command_line_or_a_log(secured: Secured) -> None:
    for service in secured.fleet.services:
        command = Path(f"/proc/{service.process.pid}/cmdline").read_bytes()
        assert KEY.encode() not in command
        assert not [line for line in service.log if KEY in line]
    assert os.environ.get("SHOAL_API_KEY") is None
