"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.common.tls import TlsFiles

SERVER_NAME = "fleet.shoal.test"  # that every certificate carries, beside localhost


@dataclass(frozen=True)
class Authority:
    """One that signs; `ca` is its own certificate's file."""

    directory: Path
    ca: str
    _certificate: x509.Certificate
    _key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, directory: Path, name: str = "ca") -> Authority:
        """A new authority, which keeps its files in `directory`."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _builder(name, name, key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        signed = certificate.sign(key, hashes.SHA256())
        path = directory / f"{name}.pem"
        path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return cls(directory, str(path), signed, key)

    def issue(
        self, name: str, *, expired: bool = False, with_ca: bool = True, days: int = 1
    ) -> TlsFiles:
        """A signed certificate in files of that name, which are replaced if they exist, good for
        some days."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.DNSName(SERVER_NAME),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        certificate = _builder(name, str(issuer), key, days=-1 if expired else days).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        signed = certificate.sign(self._key, hashes.SHA256())
        cert, private = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        _replace(cert, signed.public_bytes(serialization.Encoding.PEM))
        _replace(
            private,
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        return TlsFiles(str(cert), str(private), self.ca if with_ca else "")


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, *, days: int = 1
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 10 * day)
        .not_valid_after(now + days * day)
    )
