"""Signatures of exported folders as OpenSSF Model Signing (`model-signing` 1.x) writes and verifies them.

They are Sigstore bundles. The DSSE envelope in one has an in-toto statement with the SHA-256 hash of each file, signed with an EC key.
`cryptography` is of the extra ``sign``.
"""

import base64
import binascii
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.extras import extra
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.replace_file import replace_file
from tensorstore_ck.common.signing_keys import PASSPHRASE_VARIABLE
from tensorstore_ck.errors import InvalidOptionError, NotFoundError, UntrustedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey

SUFFIX: Final = ".sig"
"""Added to the name of an exported folder: the name of its signature."""
_BUNDLE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD: Final = "application/vnd.in-toto+json"
_STATEMENT: Final = "https://in-toto.io/Statement/v1"
_PREDICATE: Final = "https://model_signing/signature/v1.0"
_GIT: Final = (".git", ".github", ".gitattributes", ".gitignore")
"""What model-signing leaves out of a folder by default."""
_CURVES: Final = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""Curve -> its hash."""
_MAX_BYTES: Final = 64 << 20


class FolderSigner:
    """An EC key in a PEM file; reading it before an export finds a wrong one early."""

    def __init__(self, key: str | os.PathLike[str]) -> None:
        """`key`: the file; the passphrase of an encrypted one is ``TSCK_SIGN_PASSPHRASE``.

        Raises:
            NotFoundError: there is no such file.
            InvalidOptionError: it holds no private EC key, or the passphrase is missing or wrong.
            MissingExtraError: `cryptography` is not installed.
        """
        self._key = _private_key(key)

    def sign(self, folder: str, name: str) -> bytes:
        """The bundle that signs all files of a folder, which is to be called `name`."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # noqa: PLC0415 - an extra, which the key has needed

        resources = [{"name": file, "algorithm": "sha256", "digest": digest} for file, digest in sorted(_digests(folder, _GIT).items())]
        all_digests = b"".join(bytes.fromhex(each["digest"]) for each in resources)
        how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": list(_GIT)}
        statement = {
            "_type": _STATEMENT,
            "subject": [{"name": name, "digest": {"sha256": hashlib.sha256(all_digests).hexdigest()}}],
            "predicateType": _PREDICATE,
            "predicate": {"serialization": how, "resources": resources},
        }
        payload = json.dumps(statement).encode()
        public = self._key.public_key()
        hint = hashlib.sha256(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
        signature = self._key.sign(_signed_bytes(payload), _algorithm(public))
        bundle = {
            "mediaType": _BUNDLE,
            "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": _PAYLOAD,
                "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
            },
        }
        return json.dumps(bundle, indent=1).encode() + b"\n"


def write_signature(path: str, bundle: bytes) -> None:
    """Writes a bundle, and replaces an earlier one."""
    with os_errors("write", path, os.path.dirname(path) or "."):
        replace_file(path, bundle)


def verify_folder(folder: str, signature: str, key: str) -> tuple[str, ...]:
    """Checks that a bundle signs exactly the files of a folder, with the private key of `key`, a public EC key in a PEM file.

    Files that the bundle says are left out, such as ``.gitignore``, are not checked. Returns the names of the files that are signed.

    Raises:
        UntrustedError: the signature is not of this key, or a file differs, is missing, or is not signed.
        InvalidOptionError: a file is no bundle, or no key.
        NotFoundError: a file or the folder is not there.
    """
    if not os.path.isdir(folder):
        raise NotFoundError(f"there is no folder {folder}", object_id=folder)
    public, data = _public_key(key), _read(signature, "signature")
    try:
        bundle = parse_json(data)
        envelope = bundle["dsseEnvelope"]
        if bundle["mediaType"] != _BUNDLE or envelope["payloadType"] != _PAYLOAD or len(envelope["signatures"]) != 1:
            raise ValueError("another kind of bundle")
        payload = base64.b64decode(envelope["payload"], validate=True)
        signed = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        if not _is_signed(public, signed, payload):
            raise UntrustedError(
                f"{signature} is not signed with the key in {key}: it was forged, or another key signed it", object_id=signature
            )
        expected, ignored = _signed_digests(parse_json(payload))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, binascii.Error) as exc:
        raise InvalidOptionError(
            f"{signature} is no signature of model-signing 1.x with one key: {exc!r:.200}", object_id=signature
        ) from exc
    own = os.path.relpath(os.path.abspath(signature), os.path.abspath(folder))
    found = _digests(folder, (*ignored, own))
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not signed" for name in sorted(found.keys() - expected.keys())]
    problems += [f"{name} is not what was signed" for name in sorted(found.keys() & expected.keys()) if found[name] != expected[name]]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise UntrustedError(f"{folder} is not what {signature} signs: {problems[0]}{more}", object_id=folder)
    return tuple(sorted(found))


def _signed_digests(statement: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """File -> SHA-256 hash; and which paths of the folder do not count."""
    predicate = statement["predicate"]
    how, resources = predicate["serialization"], predicate["resources"]
    if (statement["_type"], statement["predicateType"], how["method"]) != (_STATEMENT, _PREDICATE, "files"):
        raise ValueError("another kind of statement")
    if any(each["algorithm"] != "sha256" for each in resources):
        raise ValueError("files that are hashed with another algorithm than SHA-256")
    digests = {str(each["name"]): bytes.fromhex(each["digest"]).hex() for each in resources}
    all_digests = b"".join(bytes.fromhex(each["digest"]) for each in resources)
    (subject,) = statement["subject"]
    if hashlib.sha256(all_digests).hexdigest() != subject["digest"]["sha256"] or len(digests) != len(resources):
        raise ValueError("its hashes contradict each other")
    return digests, tuple(str(path) for path in how.get("ignore_paths", ()))


def _digests(folder: str, ignored: tuple[str, ...]) -> dict[str, str]:
    """File -> SHA-256 hash, without what lies below an ignored path.

    Raises:
        UntrustedError: something is neither a folder nor a regular file: what a link leads to, or a FIFO passes on, cannot be signed.
        PermissionDeniedError: a file or folder cannot be read.
    """
    found = {}
    with os_errors("read", folder):
        for parent, folders, files in os.walk(folder, onerror=_raise):
            at = os.path.relpath(parent, folder)
            names = {name: name if at == "." else f"{at}/{name}" for name in (*folders, *files)}
            folders[:] = [name for name in folders if names[name] not in ignored]
            for name in (*folders, *files):
                path = os.path.join(parent, name)
                if names[name] in ignored:
                    continue
                mode = os.lstat(path).st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    what = "a link" if stat.S_ISLNK(mode) else "a FIFO, socket or device"
                    raise UntrustedError(f"{path} is {what}: only regular files can be signed", object_id=names[name])
                if stat.S_ISREG(mode):
                    with open(path, "rb") as file:
                        found[names[name]] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _raise(exc: OSError) -> None:
    raise exc


# --- EC keys -----------------------------------------------------------------------------------------------------------


def _private_key(path: str | os.PathLike[str]) -> "EllipticCurvePrivateKey":
    with extra("sign", "signing an export"):
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey  # noqa: PLC0415
        from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415
    data, passphrase = _read(path, "key"), os.environ.get(PASSPHRASE_VARIABLE)
    try:
        key = load_pem_private_key(data, passphrase.encode() if passphrase and b"ENCRYPTED" in data else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise InvalidOptionError(
            f"the key {path} cannot be used: it is no private key in PEM, or {PASSPHRASE_VARIABLE} is not its passphrase",
            object_id=str(path),
        ) from exc
    if not isinstance(key, EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise InvalidOptionError(f"the key {path} is no EC key of P-256, P-384 or P-521, which model-signing needs", object_id=str(path))
    return key


def _public_key(path: str) -> "EllipticCurvePublicKey":
    with extra("sign", "checking a signature"):
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey  # noqa: PLC0415
        from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415
    try:
        key = load_pem_public_key(_read(path, "key"))
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise InvalidOptionError(f"the key {path} is no public key in PEM", object_id=path) from exc
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise InvalidOptionError(f"the key {path} is no EC key of P-256, P-384 or P-521", object_id=path)
    return key


def _is_signed(public: "EllipticCurvePublicKey", signature: bytes, payload: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an extra, which the key has needed

    try:
        public.verify(signature, _signed_bytes(payload), _algorithm(public))
    except InvalidSignature:
        return False
    return True


def _algorithm(public: "EllipticCurvePublicKey") -> "ECDSA":
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415 - an extra, which the key has needed
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA  # noqa: PLC0415

    return ECDSA(getattr(hashes, _CURVES[public.curve.name])())


def _signed_bytes(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)


def _read(path: str | os.PathLike[str], what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            return file.read(min(_MAX_BYTES, status.st_size) if stat.S_ISREG(status.st_mode) else _MAX_BYTES)  # a pipe has no size
    except OSError as exc:
        raise NotFoundError(f"the {what} {path} cannot be read: {exc.strerror}", object_id=str(path)) from exc
