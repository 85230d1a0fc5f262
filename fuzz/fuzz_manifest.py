"""Staged manifests. An input is a body: decoded as it is, and once more under a right hash."""

from contextlib import suppress

import atheris
from _common import fuzz, mutate_body

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.common.ids import derived_hash
    from tensorstore_ck.errors import CorruptObjectError
    from tensorstore_ck.session.staging import manifest
    from tensorstore_ck.session.staging.manifest import decode_manifest


def target(data: bytes) -> None:
    with suppress(CorruptObjectError):
        decode_manifest(data, "a manifest")
    decode_manifest(data + derived_hash(manifest._CONTEXT, data), "a manifest")


if __name__ == "__main__":
    fuzz("manifest", target, mutate_body)
