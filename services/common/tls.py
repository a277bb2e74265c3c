"""TLS on every wire: which files prove who we are, and the credentials made of them.

A process listens with one set of files and connects to its peers with another; each is
a certificate, its key, and the authorities whose signature the other side must have.
Files may be replaced at any time: what is new is used from the next connection on, and
what cannot be read leaves the last good credentials in use. Unix sockets stay plain.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from services.common.config import option
from services.common.errors import StartupError
from services.common.watched import WatchedFiles

log = logging.getLogger(__name__)

_GROUP = "TLS"


@dataclass(frozen=True)
class TlsOptions:
    """The flags of a listener. Configs borrow them."""

    tls_cert: str = option(
        "", "certificate chain (PEM) to listen with; default: no TLS", group=_GROUP, metavar="FILE"
    )
    tls_key: str = option("", "private key of --tls-cert", group=_GROUP, metavar="FILE")
    tls_ca: str = option(
        "",
        "authorities (PEM) one of which must have signed a client's certificate; default:"
        " clients need none",
        group=_GROUP,
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """One side's files; all empty means no TLS.

    `server_name` is for a side that connects: the name that the other side's certificate
    must carry, in place of the host in its address.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""

    def __bool__(self) -> bool:
        return bool(self.cert or self.ca)

    def check(self, prefix: str = "--tls", *, listens: bool = True) -> None:
        """Raises ValueError for flags that do not make one side of a connection."""
        if bool(self.cert) != bool(self.key):
            raise ValueError(f"{prefix}-cert and {prefix}-key need each other")
        if listens and self.ca and not self.cert:
            raise ValueError(f"{prefix}-ca needs {prefix}-cert and {prefix}-key")
        if self.server_name and not self:
            raise ValueError(f"{prefix}-server-name needs {prefix}-ca")


NO_TLS = TlsFiles()


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """A gRPC listener's credentials; each handshake uses the files as they are then.

    Raises StartupError if they cannot be used.
    """
    watched = WatchedFiles((files.cert, files.key, files.ca))
    first = _server_configuration(files)

    def fetch() -> Any:
        if not watched.changed():
            return None  # goes on with the last one
        try:
            configuration = _server_configuration(files)
        except StartupError as error:
            log.error("new TLS files are not used", extra={"reason": str(error)})
            return None
        log.info("using new TLS files", extra={"certificate": files.cert})
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        first, fetch, require_client_authentication=bool(files.ca)
    )


def _server_configuration(files: TlsFiles) -> Any:
    server_context(files)  # gRPC takes anything and fails each handshake
    pairs = [(_read(files.key), _read(files.cert))]
    return grpc.ssl_server_certificate_configuration(
        pairs, root_certificates=_read(files.ca) if files.ca else None
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials to connect with, from the files as they are now.

    Without an authority of its own it trusts those of gRPC. Raises StartupError.
    """
    return grpc.ssl_channel_credentials(
        root_certificates=_read(files.ca) if files.ca else None,
        private_key=_read(files.key) if files.key else None,
        certificate_chain=_read(files.cert) if files.cert else None,
    )


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """A listener's context with the files as they are now. Raises StartupError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
        if files.ca:
            context.load_verify_locations(files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "strerror", None) or error
        raise StartupError(f"cannot use {files.cert}, {files.key} {files.ca}: {reason}")
    return context


def _no_password() -> str:
    raise ValueError("the key needs a password, which a service cannot be asked for")


def reloading_context(files: TlsFiles) -> ssl.SSLContext:
    """As `server_context`, but each handshake uses the files as they are then.

    The context that a listener keeps only hands over to the one of the files; a client's
    failed handshake leaves a log line. Raises StartupError.
    """
    outer = server_context(files)
    watched = WatchedFiles((files.cert, files.key, files.ca))
    current = outer

    def hand_over(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal current
        if watched.changed():
            try:
                current = server_context(files)
            except StartupError as error:
                log.error("new TLS files are not used", extra={"reason": str(error)})
            else:
                log.info("using new TLS files", extra={"certificate": files.cert})
        if current is not outer:
            connection.context = current

    outer.sni_callback = hand_over
    outer.sslobject_class = _ServerSide
    return outer


class _ServerSide(ssl.SSLObject):
    """Logs why a client was turned away, which asyncio does not."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            log.warning("refused a client's TLS handshake", extra={"reason": reason})
            raise


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror or error}")
