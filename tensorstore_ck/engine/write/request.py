"""What a save says besides the state: its options, as the caller gives them, and the request that they make at one entry of the log."""

import operator
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypedDict, cast, get_args

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.sampled_checks import NOT_VERIFIED, SAMPLE_SHARE, Sampling
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.codec import CodecName, Coding, DeltaOption, check_codec_name, check_delta
from tensorstore_ck.format.record import MAX_STEP, SaveOrigin, check_metrics, check_origin, encode_metadata
from tensorstore_ck.log import validate_ref_name
from tensorstore_ck.log.snapshot import Snapshot


class AnyHead:
    """The type of `ANY`."""

    def __repr__(self) -> str:
        return "tsck.ANY"


ANY: Final = AnyHead()
"""As ``expect=``: move the ref from wherever it is."""

Expected = Digest | AnyHead | None
"""Root that the ref must have, `ANY`, or None for a ref that must not exist."""


class LastSeen:
    """The type of `LAST_SEEN`."""

    def __repr__(self) -> str:
        return "tsck.LAST_SEEN"


LAST_SEEN: Final = LastSeen()
"""The default. As ``expect=``: move the ref from where this handle last saved or restored it. As ``parent=``: that snapshot."""


Unchanged = Literal["warn", "error", "ok"]


class SaveChecks(NamedTuple):
    """How a save is checked."""

    unchanged: Unchanged = "ok"
    """What to do when its content contradicts its step."""
    verify_capture: float = 0.0
    """The share of larger tensors that is read a second time; 0: no tensor is."""


def require_checks(unchanged: object, verify_capture: object) -> SaveChecks:
    """Checks these options of a save.

    Raises:
        InvalidOptionError: one is invalid.
    """
    if unchanged not in get_args(Unchanged):
        raise InvalidOptionError(f"unchanged must be 'warn', 'error' or 'ok', not {unchanged!r}", object_id="unchanged")
    if isinstance(verify_capture, bool) or not isinstance(verify_capture, int | float) or not 0 <= verify_capture <= 1:
        raise InvalidOptionError(f"verify_capture must be a share from 0.0 to 1.0, not {verify_capture!r}", object_id="verify_capture")
    return SaveChecks(cast(Unchanged, unchanged), float(verify_capture))


class SaveOptions(NamedTuple):
    """The arguments of a save besides the state, checked as far as possible without reading the log."""

    ref: str
    step: int | None
    expect: object
    metadata: bytes
    metrics: dict[str, float]
    codec: CodecName | None
    delta: DeltaOption
    parent: object
    checks: SaveChecks
    origin: SaveOrigin
    any_step: bool = False
    """Whether the step may be lower than that of a head that was only restored: see `RefFence.expected`."""


class SaveArguments(TypedDict, total=False):
    """What a caller may say of a save besides state, ref and step; see `check_options`."""

    metrics: Mapping[str, float] | None
    metadata: Mapping[str, object] | None
    expect: object
    parent: object
    codec: object
    delta: object
    unchanged: object
    verify_capture: object
    triggers: object
    epoch: object
    attributes: object
    made_ns: int | None
    any_step: bool


def check_options(
    engine: Engine,
    ref: str,
    *,
    step: object = None,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, object] | None = None,
    expect: object = LAST_SEEN,
    parent: object = LAST_SEEN,
    codec: object = None,
    delta: object = None,
    unchanged: object = "warn",
    verify_capture: object = SAMPLE_SHARE,
    triggers: object = (),
    epoch: object = None,
    attributes: object = None,
    made_ns: int | None = None,
    any_step: bool = False,
) -> SaveOptions:
    """Checks the arguments of a save.

    Raises:
        InvalidOptionError, InvalidNameError: an argument is not what it must be.
    """
    checks = require_checks(unchanged, verify_capture)
    validate_ref_name(ref)
    packed_metadata, checked_metrics = encode_metadata(metadata), check_metrics(metrics)
    origin = check_origin(triggers, epoch, made_ns, attributes=attributes, metadata=metadata)
    try:
        number = None if step is None else operator.index(step)  # type: ignore[arg-type]  # what has no index is a TypeError
    except TypeError:
        number = None
    if isinstance(step, bool) or (number is None and step is not None):
        raise InvalidOptionError(f"step must be an integer, not {step!r}", object_id="step")
    if number is not None and not 0 <= number <= MAX_STEP:
        raise InvalidOptionError(f"step {number} must be from 0 to {MAX_STEP}", object_id="step")
    if not (expect is None or isinstance(expect, LastSeen | AnyHead | Snapshot | str)):
        raise InvalidOptionError(f"expect must be a root, tsck.ANY or None, not {type(expect).__name__}", object_id="expect")
    if not (parent is None or isinstance(parent, LastSeen | Snapshot | str)):
        raise InvalidOptionError(f"parent must be an address, a Snapshot or None, not {type(parent).__name__}", object_id="parent")
    engine.require_writable()
    chosen = None if codec is None else check_codec_name(codec)
    differences = None if delta is None else check_delta(delta)
    how = (chosen, differences, parent, checks, origin, any_step)
    return SaveOptions(ref, number, expect, packed_metadata, checked_metrics, *how)


class SaveRequest(NamedTuple):
    """The options of a save as of one log entry: its parent, where the ref must be, and how blocks are encoded."""

    ref: str
    step: int | None
    parent: Digest | None
    """The snapshot that the new one continues; part of its root."""
    expect: Expected
    metadata: bytes
    metrics: dict[str, float]
    coding: Coding = Coding("raw")
    nearest: Digest | None = None
    """The snapshot in which blocks are looked up first, most likely the parent: a hint that does not affect the root."""
    unchanged: Unchanged = "ok"
    """See `SaveChecks`."""
    sampling: Sampling = NOT_VERIFIED
    """Which part of the state is sampled."""
    began_ns: int | None = None
    """When the save began, by the clock of this host; None: the entry does not report the duration."""
    origin: SaveOrigin = SaveOrigin()
