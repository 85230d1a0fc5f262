"""Ed25519 keys: made, kept in files, and written as text. `cryptography`, of the extra ``sign``, is imported where a key is used."""

import base64
import binascii
import os
from typing import TYPE_CHECKING, Final, Self

from tensorstore_ck.common.extras import extra
from tensorstore_ck.common.owned_files import FILE_MODE, require_safe_parent
from tensorstore_ck.common.replace_file import replace_file
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import AlreadyExistsError, InvalidOptionError, NotFoundError, PermissionDeniedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PASSPHRASE_VARIABLE: Final = "TSCK_SIGN_PASSPHRASE"  # noqa: S105 - its name
PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_SCHEME: Final = "ed25519:"
_ENCRYPTED: Final = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"
_MAX_FILE_BYTES: Final = 1 << 16


@short_errors
class SigningKey:
    """A private Ed25519 key, which signs the refs that a store moves: see ``sign=`` of `open`."""

    def __init__(self, private: "Ed25519PrivateKey") -> None:
        """Use `generate` or `load`."""
        self._private = private
        self.public_bytes: bytes = private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"SigningKey({self.public})"

    @property
    def public(self) -> str:
        """The public key as a trust file has it: ``ed25519:`` and 44 characters."""
        return public_text(self.public_bytes)

    @classmethod
    def generate(cls) -> Self:
        """A new key.

        Raises:
            MissingExtraError: `cryptography` is not installed.
        """
        with extra("sign", "making a signing key"):
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415 - an extra
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | os.PathLike[str], passphrase: str | None = None) -> Self:
        """The key in a PEM file, as `tsck keygen` or openssl writes it.

        Args:
            path: The file.
            passphrase: Of an encrypted file; by default the environment variable ``TSCK_SIGN_PASSPHRASE``.

        Raises:
            NotFoundError: there is no such file.
            InvalidOptionError: it holds no Ed25519 key, or the passphrase is missing or wrong.
            MissingExtraError: `cryptography` is not installed.
        """
        with extra("sign", "signing"):
            from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - an extra
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
            from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415
        data = _read(path)
        is_encrypted = data.startswith(_ENCRYPTED)
        secret = passphrase or os.environ.get(PASSPHRASE_VARIABLE) if is_encrypted else None
        if is_encrypted and not secret:
            raise InvalidOptionError(
                f"the signing key {path} is encrypted: set {PASSPHRASE_VARIABLE}, or pass SigningKey.load(path, passphrase)",
                object_id=str(path),
            )
        try:
            private = load_pem_private_key(data, secret.encode() if secret else None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
            why = "the passphrase is wrong, or the file is damaged" if is_encrypted else "it holds no private key in PEM"
            raise InvalidOptionError(f"the signing key {path} cannot be used: {why}", object_id=str(path)) from exc
        if not isinstance(private, Ed25519PrivateKey):
            raise InvalidOptionError(f"the signing key {path} is no Ed25519 key: make one with `tsck keygen NAME`", object_id=str(path))
        return cls(private)

    def save(self, path: str | os.PathLike[str], passphrase: str | None = None) -> None:
        """Writes the key to a new file that only this user can read, encrypted if there is a passphrase.

        Raises:
            AlreadyExistsError: the file exists.
            PermissionDeniedError: it cannot be written there, or others could replace it.
        """
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - an extra, which this key has needed

        if os.path.lexists(path):
            raise AlreadyExistsError(f"{path} exists, and a key is never overwritten: take another name", object_id=str(path))
        encryption: serialization.KeySerializationEncryption = (
            serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
        )
        data = self._private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        try:
            require_safe_parent(os.path.dirname(os.path.abspath(path)))
            replace_file(path, data, mode=FILE_MODE)
        except OSError as exc:
            raise PermissionDeniedError(f"the signing key {path} cannot be written: {exc.strerror}", object_id=str(path)) from exc

    def sign(self, message: bytes) -> bytes:
        """The signature of `message`: 64 bytes."""
        return self._private.sign(message)


def is_encrypted(path: str | os.PathLike[str]) -> bool:
    """Whether a key's file needs a passphrase. Raises `NotFoundError`."""
    return _read(path).startswith(_ENCRYPTED)


def is_signed_by(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` is that of `message` by a public key.

    Raises:
        MissingExtraError: `cryptography` is not installed.
    """
    with extra("sign", "checking a signature"):
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):  # ValueError: no point of the curve
        return False
    return True


def public_text(public_key: bytes) -> str:
    """A public key as text."""
    return _SCHEME + base64.b64encode(public_key).decode()


def parse_public(text: object) -> bytes:
    """The public key that a text stands for.

    Raises:
        ValueError: it is no public key.
    """
    if not isinstance(text, str) or not text.startswith(_SCHEME):
        raise ValueError(f"a public key begins with {_SCHEME}, as `tsck keygen` prints it, not {text!r:.80}")
    try:
        key = base64.b64decode(text.removeprefix(_SCHEME), validate=True)
    except binascii.Error as exc:
        raise ValueError(f"{text!r:.80} is no public key: {exc}") from exc
    if len(key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"{text!r:.80} is no public key: it has {len(key)} bytes, not {PUBLIC_KEY_BYTES}")
    return key


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_FILE_BYTES)
    except OSError as exc:
        raise NotFoundError(f"the signing key {path} cannot be read: {exc.strerror}", object_id=str(path)) from exc
