"""A running fleet, asked from outside: each peer's health and version, the gateway's clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import tokenizer_pb2, tokenizer_pb2_grpc, worker_pb2, worker_pb2_grpc
from services import __version__
from services.client.doctor.config import DoctorConfig
from services.client.doctor.finding import Finding, ok, problem, warning
from services.client.doctor.tls_check import check_files, check_tls, speaks_tls
from services.client.endpoint import Endpoint
from services.common.errors import StartupError
from services.common.rpc import open_channel
from services.common.tls import TlsFiles

_SKEW_SECONDS = 5


async def check_fleet(config: DoctorConfig) -> AsyncIterator[Finding]:
    """Everything about the fleet that was named."""
    if config.url:
        async for finding in _gateway(config):
            yield finding
    if not config.peers:
        return
    if own := check_files(config.peer_tls, "--peer-tls"):
        yield own
        if own.level == "problem":
            return
    checks = (_peer(role, address, config) for role, address in config.peers)
    for findings in await asyncio.gather(*checks):
        for finding in findings:
            yield finding


async def _gateway(config: DoctorConfig) -> AsyncIterator[Finding]:
    url = httpx.URL(config.url)
    if url.scheme == "https":
        files = TlsFiles(ca=config.tls_ca)
        address = f"{url.host}:{url.port or 443}"
        finding = await check_tls(address, files, alpn="http/1.1", timeout=config.timeout)
        yield finding
        if finding.level == "problem":
            return
    endpoint = Endpoint.of(config)
    root = endpoint.root
    try:
        async with endpoint.client(config.timeout) as client:
            ready = await client.get(f"{root}/readyz")
            info = await client.get(f"{root}/server_info")
    except StartupError as error:
        yield problem("gateway", str(error))
        return
    except httpx.TransportError as error:
        yield problem("gateway", f"{root}: {error or 'no answer'}: is it running, and reachable?")
        return
    if ready.status_code == 200:
        yield ok("gateway", f"{root} is ready")
    else:
        why = " ".join(ready.text.split()) or str(ready.status_code)
        yield problem("gateway", f"{root} is not ready: {why}")
    yield _clock(root, ready.headers.get("date", ""))
    if info.status_code == 401:
        yield problem("gateway", f"{root} wants an API key: say --api-key or SHOAL_API_KEY")
    elif info.status_code == 200:
        yield _told(root, info)
    else:
        yield warning("gateway", f"{root} is no gateway of Shoal: /server_info {info.status_code}")


def _clock(root: str, date: str) -> Finding:
    try:
        skew = time.time() - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return warning("clock", f"{root} tells no date")
    if abs(skew) > _SKEW_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        return warning(
            "clock",
            f"this machine is {abs(skew):.0f} s {way} {root}: run an NTP client on both, or traces"
            " and certificates will not fit",
        )
    return ok("clock", f"within {_SKEW_SECONDS} s of {root}")


def _told(root: str, info: httpx.Response) -> Finding:
    try:
        value = info.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        text = f"{root} is no gateway of Shoal: /server_info is no JSON object"
        return warning("gateway", text)
    return _version(root, str(value.get("version", "")))


def _version(where: str, theirs: str) -> Finding:
    if theirs == __version__:
        return ok("version", f"{where} runs {theirs}, as this machine does")
    told = theirs or "one that does not say its version"
    return warning(
        "version",
        f"{where} runs {told}, this machine {__version__}: let all services run one version",
    )


async def _peer(role: str, address: str, config: DoctorConfig) -> list[Finding]:
    where, findings = f"{role} {address}", list[Finding]()
    files = config.peer_tls
    try:
        if speaks_tls(address, files):
            tls = await check_tls(address, files, alpn="h2", timeout=config.timeout)
            findings.append(tls)
            if tls.level == "problem":
                return findings
        async with open_channel(address, files) as channel:
            findings += await _ask(role, where, channel, config.timeout)
    except StartupError as error:
        findings.append(problem(role, f"{where}: {error}"))
    except grpc.aio.AioRpcError as error:
        findings.append(problem(role, f"{where} {_reason(error)}"))
    return findings


async def _ask(role: str, where: str, channel: grpc.aio.Channel, timeout: float) -> list[Finding]:
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=f"shoal.v1.{role.capitalize()}")
    answer = await health.Check(request, timeout=timeout)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        state = ok(role, f"{where} serves")
    else:
        state = warning(role, f"{where} does not serve yet: it loads, or it drains")
    if role == "worker":
        stub = worker_pb2_grpc.WorkerStub(channel)
        info = (await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=timeout)).info
        return [state, _version(where, info.version)] if info.epoch else [state]
    version = await _told_version(role, channel, timeout)
    return [state] if version is None else [state, _version(where, version)]


async def _told_version(role: str, channel: grpc.aio.Channel, timeout: float) -> str | None:
    """The version in the first message of a session; None if there is none in time."""
    try:
        async with asyncio.timeout(timeout):
            if role == "tokenizer":
                stub = tokenizer_pb2_grpc.TokenizerStub(channel)
                call = stub.Session(iter([tokenizer_pb2.TokenizerSessionRequest()]))
                async for message in call:
                    return message.info.version
            else:
                detokenizer = tokenizer_pb2_grpc.DetokenizerStub(channel)
                frames = iter([tokenizer_pb2.DetokenizerSessionRequest()])
                async for frame in detokenizer.Session(frames):
                    return frame.info.version
    except TimeoutError:
        pass
    return None


def _reason(error: grpc.aio.AioRpcError) -> str:
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return "does not answer: is it running, reachable, and is TLS the same on both sides?"
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return "did not answer in time: is it stuck, or a firewall between?"
    if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
        return "answers, but is no such service: look at the address"
    return f"answers {error.code().name}: {error.details()}"
