"""Certificates: the authority of a workspace, and what it signs for names whose TLS is read on the way.

All functions that make keys or signatures block for about a millisecond; on the event loop call them on a thread.
"""

from __future__ import annotations

import datetime
import os
import ssl
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: Guests whose clock is a little behind must not take a fresh certificate for one of the future.
_BACKDATED: Final = datetime.timedelta(days=2)
AUTHORITY_DAYS: Final = 3650
LEAF_DAYS: Final = 30


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate (PEM; of a leaf: with its chain) and its private key (PEM, not shown)."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def make_authority(name: str, now: float) -> KeyPair:
    """A new authority (EC P-256, ten years). `name`: for people, at most 64 characters count. `now`: Unix seconds."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    began = datetime.datetime.fromtimestamp(now, datetime.UTC) - _BACKDATED
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(began)
        .not_valid_after(began + datetime.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def issue(authority: KeyPair, name: str, now: float) -> KeyPair:
    """A certificate for exactly this DNS name, valid for `LEAF_DAYS`. Raises ValueError when the authority is none, or
    the name cannot be in a certificate."""
    signer = x509.load_pem_x509_certificate(authority.certificate_pem)
    signing = serialization.load_pem_private_key(authority.key_pem, None)
    if not isinstance(signing, ec.EllipticCurvePrivateKey):
        raise ValueError("the key of the authority is not an elliptic curve key")  # noqa: TRY004
    key = ec.generate_private_key(ec.SECP256R1())
    began = datetime.datetime.fromtimestamp(now, datetime.UTC) - _BACKDATED
    names = [x509.NameAttribute(NameOID.COMMON_NAME, name)] if len(name) <= 64 else []
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(names))
        .issuer_name(signer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(began)
        .not_valid_after(began + _BACKDATED + datetime.timedelta(days=LEAF_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=not names)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_authority_identifier(signer), critical=False)
        .sign(signing, hashes.SHA256())
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def _authority_identifier(signer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    own = signer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def server_context(pair: KeyPair) -> ssl.SSLContext:
    """To be the server of this certificate. The key is never in a file: `ssl` wants a path, and gets one of memory."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pair.key_pem + pair.certificate_pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context
