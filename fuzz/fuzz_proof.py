"""Proofs, as somebody gets them who trusts nobody. An input is a body: decoded as it is, and once more under a right seal."""

from contextlib import suppress

import atheris
from _common import fuzz_sealed

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.errors import MismatchError
    from tensorstore_ck.format.proof import decode_proof


MAX_PART_BYTES = 1 << 16
"""A caller verifies a proof whose root it has compared: work is then in proportion to the parts, not to the proof."""


def read(data: bytes) -> None:
    proof = decode_proof(data)
    assert proof.encode() == data
    proof.root()
    proof.step()
    if max(part.size_bytes for part in proof.parts) > MAX_PART_BYTES:
        return
    shown = proof.verify()
    assert sum(block.size_bytes for block in shown.blocks) == shown.spec.size_bytes
    with suppress(MismatchError):
        shown.require_data(bytes(min(shown.spec.size_bytes, 1 << 16)))


if __name__ == "__main__":
    fuzz_sealed("proof", read)
