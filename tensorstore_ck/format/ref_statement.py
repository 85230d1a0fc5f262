"""What a signature of a ref covers, as bytes. Pure. Format: FORMAT.md, "Signatures"."""

import struct
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Digest

_PREFIX: Final = b"tensorstore_ck v1 signed ref\0"
_FIXED: Final = struct.Struct("<16s32sQQ?q")
_LENGTH: Final = struct.Struct("<H")


class LogName(NamedTuple):
    """One log of one store."""

    store: bytes
    """The UUID of the store."""
    log: str
    """The prefix of the log."""


class RefStatement(NamedTuple):
    """A ref is at a snapshot, as of one entry of one log: so a signature counts nowhere else, and never again."""

    of: LogName
    ref: str
    root: Digest
    step: int | None
    number: int
    """The number of the log entry that carries the signature. It grows with each signature of a ref."""
    time_ns: int
    """By the clock of the host that signed."""

    def encode(self) -> bytes:
        """The bytes that are signed: different for different statements, and never those of another use of the key."""
        fixed = _FIXED.pack(self.of.store, self.root, self.number, self.time_ns, self.step is not None, self.step or 0)
        return _PREFIX + fixed + b"".join(_LENGTH.pack(len(text.encode())) + text.encode() for text in (self.ref, self.of.log))


class SignedRef(NamedTuple):
    """A statement with its signature, which may be forged."""

    statement: RefStatement
    key: bytes
    """The public key."""
    signature: bytes
