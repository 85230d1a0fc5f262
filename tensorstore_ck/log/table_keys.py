"""Keys of the ref table. Pure; format, because a checkpoint is a dump of it.

Keys as in a checkpoint; in a host's table they begin with `PREFIX`. Numbers in keys are big-endian, so that keys sort as
numbers do; a step is stored plus 2**63. ``name`` is ASCII without a zero byte. ``?``: or nil. Rows: table_rows.py.

    key                     row
    b name                  snapshot, root, step?, n, time_ns, length     a branch: where it is, moves so far
    l name 00 seq:8         snapshot, root, step?, n, time_ns, op         its moves, from 0 on, without removed ones
    s name 00 step:8        seq                                           its newest move to a snapshot of that step
    q name                  seq                                           a removed branch: moves so far
    t name                  snapshot, root, n, time_ns                    a tag
    u ulid:16               root, record, parent?, ref, step?, n, time_ns, metrics, logical_bytes, new_bytes
    r root:32 ulid:16       n                                             the snapshots of that root, and their entries
    a root:32               metrics, mark, reason                         what was added to a root later
    x txn:16                put, n                                        how a transaction ended (put: bool), and where
    y txn:16                snapshot, root, record, parent?, ref, step?, n, time_ns, metrics, logical_bytes, new_bytes   a staged snapshot
    k ulid:16               holds, n      how many moves, tags, pins and undo windows hold a snapshot; where that changed last
    p ulid:16 owner         reason, expires_ns?, n, time_ns               a pin; the owner in UTF-8
    e n:8 name              time_ns, kind                                 an undo window; kind: branch, snapshots or tag
    d n:8 name 00 seq:8     as l                                          what was removed then
    o glob                  rules, n, time_ns                             the policy of matching refs: FORMAT.md, "Policies"
    g kind:1 ulid:16        swept, n                                      an object that is condemned or swept (swept: bool), and where
    m pack:16 moved:16      n, hash, targets                              a relocation of a pack
    w moved:16              pack                                          the same, by its moved object
    c pack:16               url                                           the cold location of a pack
    z                       n                                             the horizon
    f                       n, op                                         the first critical operation unknown to this build
    h                       n, hash, fold                                 (not in checkpoints) the entry folded last
"""

from typing import Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.log.object_set import FOLDERS

PREFIX: Final = b"r/"
HEAD_KEY: Final = PREFIX + b"h"
STOP_KEY: Final = PREFIX + b"f"
HORIZON_KEY: Final = PREFIX + b"z"
OBJECTS_PREFIX: Final = PREFIX + b"g"
_STEP_BIAS: Final = 1 << 63

_KIND_BYTES: Final = {kind: {"pack": b"k", "part": b"p", "snapshot": b"s", "moved": b"m"}[kind] for kind in FOLDERS}
KINDS_BY_BYTE: Final = {byte: kind for kind, byte in _KIND_BYTES.items()}


def branch_key(name: str) -> bytes:
    """Where a branch is."""
    return PREFIX + b"b" + name.encode()


def moves_prefix(name: str) -> bytes:
    """The prefix of a branch's moves."""
    return PREFIX + b"l" + name.encode() + b"\0"


def move_key(name: str, seq: int) -> bytes:
    """The key of one move."""
    return moves_prefix(name) + seq.to_bytes(8, "big")


def step_key(name: str, step: int) -> bytes:
    """The key of a branch's step."""
    return PREFIX + b"s" + name.encode() + b"\0" + (step + _STEP_BIAS).to_bytes(8, "big")


def tag_key(name: str) -> bytes:
    """The key of a tag."""
    return PREFIX + b"t" + name.encode()


def snapshot_key(ulid: bytes) -> bytes:
    """The key of a snapshot."""
    return PREFIX + b"u" + ulid


def root_key(root: bytes, ulid: bytes = b"") -> bytes:
    """The key of a snapshot of a root; the prefix of such keys without `ulid`, or with the beginning of a root."""
    return PREFIX + b"r" + root + ulid


def note_key(root: bytes) -> bytes:
    """The key of what was added to a root."""
    return PREFIX + b"a" + root


def txn_key(txn: bytes) -> bytes:
    """The key of a transaction."""
    return PREFIX + b"x" + txn


def staged_key(txn: bytes) -> bytes:
    """The key of a staged snapshot."""
    return PREFIX + b"y" + txn


def length_key(name: str) -> bytes:
    """The key of a removed branch's length."""
    return PREFIX + b"q" + name.encode()


def holds_key(ulid: bytes) -> bytes:
    """The key of the number of holders of a snapshot."""
    return PREFIX + b"k" + ulid


def pin_key(ulid: bytes, owner: str = "") -> bytes:
    """The key of a pin; without `owner`, the prefix of those of a snapshot."""
    return PREFIX + b"p" + ulid + owner.encode()


def policy_key(glob: str) -> bytes:
    """The key of a policy."""
    return PREFIX + b"o" + glob.encode()


def window_key(n: int, name: str) -> bytes:
    """The key of an undo window."""
    return PREFIX + b"e" + n.to_bytes(8, "big") + name.encode()


def forgotten_prefix(n: int, name: str) -> bytes:
    """The prefix of the moves in an undo window."""
    return PREFIX + b"d" + n.to_bytes(8, "big") + name.encode() + b"\0"


def forgotten_key(n: int, name: str, seq: int) -> bytes:
    """The key of a move in an undo window."""
    return forgotten_prefix(n, name) + seq.to_bytes(8, "big")


def object_key(kind: str, ulid: bytes) -> bytes:
    """The key of an object that gc condemned or swept."""
    return OBJECTS_PREFIX + _KIND_BYTES[kind] + ulid


def object_of(key: bytes) -> tuple[str, Ulid]:
    """(kind, ulid) of an `object_key`."""
    at = len(OBJECTS_PREFIX)
    return KINDS_BY_BYTE[key[at : at + 1]], Ulid(key[at + 1 :])


def relocation_key(pack: bytes, moved: bytes = b"") -> bytes:
    """The key of a relocation; without `moved`, the prefix of those of a pack."""
    return PREFIX + b"m" + pack + moved


def location_key(pack: bytes) -> bytes:
    """The key of a pack's cold location."""
    return PREFIX + b"c" + pack


def moved_key(moved: bytes) -> bytes:
    """The key of a relocation by its moved object."""
    return PREFIX + b"w" + moved
