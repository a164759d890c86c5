"""The primitives of secure sums, none of them ours: `cryptography` has all but Shamir's sharing: `pycryptodome`."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

Vector = NDArray[np.uint64]
HASH = hashes.SHA384()  # of what is signed
HALF = 16  # bytes that Shamir's sharing takes at once
NONCE = 12
SECRET = 32  # bytes of a seed, a secret key, a share of either
CHUNK = 1 << 17  # values of a mask at once: a megabyte


def new_key() -> tuple[bytes, bytes]:
    """A secret key for X25519 and its public key."""
    key = X25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def public_of(secret: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def is_usable(public: bytes) -> bool:
    """Whether a key can be agreed on with a public key: of 32 bytes, and not of small order."""
    try:
        shared(new_key()[0], public, b"", b"")
    except ValueError:
        return False
    return True


def shared(secret: bytes, public: bytes, salt: bytes, purpose: bytes) -> bytes:
    """A key that both sides derive, for one purpose. ValueError for a public key of small order."""
    agreed = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    return derived(agreed, salt, purpose)


def derived(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=purpose).derive(secret)


def add_mask(vector: Vector, key: bytes, sign: int) -> None:
    """Add or subtract the mask of a key: AES-256 in counter mode as 64-bit integers. A key makes one mask."""
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    zeros, into = bytes(8 * min(CHUNK, len(vector))), np.empty(8 * CHUNK + 15, np.uint8)
    for start in range(0, len(vector), CHUNK):
        part = vector[start : start + CHUNK]
        stream.update_into(zeros[: 8 * len(part)], into.data)
        mask = into[: 8 * len(part)].view("<u8")
        if sign > 0:
            part += mask
        else:
            part -= mask


def seal(key: bytes, text: bytes, context: bytes) -> bytes:
    nonce = os.urandom(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, text, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes | None:
    """What was sealed, unless anything of it, the key or the context is another."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], context)
    except (InvalidTag, ValueError):
        return None


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret of 32 bytes, `threshold` of which restore it."""
    halves = [Shamir.split(threshold, count, secret[at : at + HALF], ssss=False) for at in (0, HALF)]
    return [bytes(first[1]) + bytes(second[1]) for first, second in zip(*halves, strict=True)]


def combine(shares: Sequence[tuple[int, bytes]]) -> bytes:
    """The secret, of as many shares as its threshold, each with its number from 1 on."""
    halves = ([(number, share[at : at + HALF]) for number, share in shares] for at in (0, HALF))
    return b"".join(bytes(Shamir.combine(half, ssss=False)) for half in halves)


def sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    return key.sign(content, ec.ECDSA(HASH))


def is_signed(key: ec.EllipticCurvePublicKey, signature: bytes, content: bytes) -> bool:
    try:
        key.verify(signature, content, ec.ECDSA(HASH))
    except InvalidSignature:
        return False
    return True
