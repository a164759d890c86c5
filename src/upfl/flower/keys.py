"""Certificates and keys for a trial: `python -m upfl.flower.keys FOLDER --host NAME... --nodes N`.

    ca.crt                          the authority's certificate: every machine needs it
    superlink.pem, superlink.key    the SuperLink's certificate for its hosts, and its key: its machine alone
    node-I.pub                      registers a node: `flwr supernode register`
    node-I.key                      the node's own secret: its machine alone
    peers                           all nodes' public keys, node I as client I - 1: for secure sums, on every node
    config.toml                     how `flwr` finds the SuperLink as `upfl`; FLWR_HOME is the folder with it

The authority signs one certificate and is then forgotten: its key is never written. In earnest, take certificates from
your own authority, and have each node's owner make the node's key where it is to stay
(`ssh-keygen -t ecdsa -b 384 -N "" -f node`).
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from upfl.errors import ConfigError, UpflError

PEM = serialization.Encoding.PEM


def make_keys(folder: Path, hosts: list[str], nodes: int, address: str, days: int = 30) -> None:
    """Write certificates for `hosts` and keys of `nodes` nodes into a new folder that this user alone can read."""
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder}: is there already; keys are made once, choose another folder") from None
    authority = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "upfl trial authority")])
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    ca = _certificate(name, authority.public_key(), name, days).add_extension(constraints, critical=True)
    _write(folder / "ca.crt", ca.sign(authority, hashes.SHA384()).public_bytes(PEM))

    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    server = _certificate(subject, key.public_key(), name, days)
    server = server.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    _write(folder / "superlink.pem", server.sign(authority, hashes.SHA384()).public_bytes(PEM))
    _write(folder / "superlink.key", _private(key, serialization.PrivateFormat.PKCS8))
    peers = []
    for number in range(1, nodes + 1):
        key = ec.generate_private_key(ec.SECP384R1())
        _write(folder / f"node-{number}.key", _private(key, serialization.PrivateFormat.OpenSSH))
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        _write(folder / f"node-{number}.pub", public + b"\n")
        peers.append(b"%d %s\n" % (number - 1, public))
    _write(folder / "peers", b"".join(peers))
    connection = {"address": address, "root-certificates": str((folder / "ca.crt").resolve())}
    _write(folder / "config.toml", tomli_w.dumps({"superlink": {"default": "upfl", "upfl": connection}}).encode())


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, issuer: x509.Name, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    return builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=days))


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m upfl.flower.keys", description="Certificates and keys for a trial")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument(
        "--host", nargs="+", default=["localhost", "127.0.0.1"], help="names by which nodes reach the SuperLink"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--nodes", type=int, default=3)
    arguments = parser.parse_args()
    try:
        make_keys(arguments.folder, arguments.host, arguments.nodes, f"{arguments.host[-1]}:{arguments.port}")
    except UpflError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
