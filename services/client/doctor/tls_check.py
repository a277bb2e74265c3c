"""A TLS listener as a client finds it: whether it is trusted, for which name, and until when."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

from services.client.doctor.finding import Finding, ok, problem, warning
from services.common.listening import is_unix, split_address
from services.common.tls import TlsFiles

_SOON_DAYS = 14
_DAY = 86_400


async def check_tls(address: str, files: TlsFiles, *, alpn: str, timeout: float) -> Finding:
    """Shakes hands with `host:port` and looks at its certificate."""
    host, port = split_address(address, "address")
    name = files.server_name or host
    try:
        context = ssl.create_default_context(cafile=files.ca or None)
        context.set_alpn_protocols([alpn])
        if files.cert:
            context.load_cert_chain(files.cert, files.key)
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    except ssl.SSLCertVerificationError as error:
        return problem("TLS", f"{address}: {error.verify_message}; {_advice(error.verify_code)}")
    except ssl.SSLError as error:
        reason = error.reason or error
        what = f"{address}: the handshake fails ({reason})"
        return problem("TLS", f"{what}: does it listen with TLS, and take our certificate?")
    except (OSError, TimeoutError) as error:
        return problem("TLS", f"{address}: {error or 'no answer'}: is it running, and reachable?")
    certificate = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / _DAY
    if days < _SOON_DAYS:
        return warning("TLS", f"{address}: the certificate ends in {days:.0f} days: renew it")
    return ok("TLS", f"{address}: trusted as {name}, for {days:.0f} days more")


def check_files(files: TlsFiles, prefix: str) -> Finding | None:
    """Whether our own side's files can be read; None if there are none."""
    named = {f"{prefix}-cert": files.cert, f"{prefix}-key": files.key, f"{prefix}-ca": files.ca}
    for flag, path in named.items():
        if not path:
            continue
        try:
            Path(path).read_bytes()
        except OSError as error:
            return problem("TLS", f"{flag} {path}: {error.strerror}: name a file that can be read")
    return ok("TLS", "our own files can be read") if files else None


def speaks_tls(address: str, files: TlsFiles) -> bool:
    """Whether a peer is reached over TLS, as `services.common.rpc.open_channel` does."""
    return bool(files) and not is_unix(address)


def _advice(code: int) -> str:
    # X509_V_ERR_*, of openssl/x509_vfy.h
    if code == 10:
        return "renew it"
    if code == 9:
        return "is this machine's clock right?"
    if code in (62, 64):
        return "issue it for that name, or say --peer-tls-server-name"
    return "name the authority that signed it (--peer-tls-ca, or --tls-ca for --url)"
