"""store.json: decoded as it is, and where it is JSON once more with a right checksum."""

import json
from contextlib import suppress

import atheris
from _common import fuzz, mutate_json

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.common.ids import derived_hash
    from tensorstore_ck.errors import CorruptObjectError, FormatVersionError
    from tensorstore_ck.format.store_config import decode_config


def dumped(body: dict[str, object]) -> bytes:
    return json.dumps(body, sort_keys=True, indent=1).encode() + b"\n"


def target(data: bytes) -> None:
    with suppress(CorruptObjectError, FormatVersionError):
        assert decode_config(data, "memory://").encode() == data
    try:
        body = json.loads(data)
        body.pop("checksum", None)
        sealed = dumped({**body, "checksum": derived_hash("store.json", dumped(body)).hex()})
    except (ValueError, AttributeError, TypeError, RecursionError):
        return
    decode_config(sealed, "memory://")


if __name__ == "__main__":
    fuzz("config", target, mutate_json)
