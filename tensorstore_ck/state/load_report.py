"""Reports what did not fit at a restore: as an error, in a `LoadReport`, or as a warning."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensorstore_ck.common.units import listed
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import MismatchError
from tensorstore_ck.redaction import one_line


class LoadWarning(UserWarning):
    """A restore with ``strict=False`` left something out, or tensors that are tied here have different values in the snapshot."""


@dataclass
class LoadReport:
    """What did not fit. A restore fills the one passed as ``report=``."""

    missing: list[str] = field(default_factory=list)
    """Names in `into` that the snapshot lacks; they are unchanged."""
    unexpected: list[str] = field(default_factory=list)
    """Names in the snapshot that `into` lacks."""
    mismatched: list[str] = field(default_factory=list)
    """Names of another shape or dtype, and why; they are unchanged."""

    def deliver(self, *, strict: bool, report: "LoadReport | None", others: bool = False) -> None:
        """Fills `report`; then raises if `strict`, or warns if there is no `report`.

        `others`: names that are unexpected here may be expected on other ranks, see `UnclaimedNames`.

        Raises:
            MismatchError: something did not fit, and `strict`.
        """
        if report is not None:
            report.missing[:], report.unexpected[:], report.mismatched[:] = self.missing, self.unexpected, self.mismatched
        parts = [
            f"{len(names)} {what}: {listed(names)}"
            for what, names in (
                ("missing in the snapshot", self.missing),
                ("not expected by `into`", self.unexpected if not (others and strict) else []),
                ("do not match", self.mismatched),
            )
            if names
        ]
        if not parts:
            return
        message = f"the snapshot does not fit `into`; {'; '.join(parts)}"
        if strict:
            first = (self.missing + self.unexpected + self.mismatched)[0].partition(":")[0]
            raise MismatchError(
                f"{message}. To load a part, `store.checkout(address, into=...)` takes rename=, select= and strict=False", object_id=first
            )
        if report is None:
            warnings.warn(one_line(message), LoadWarning, stacklevel=user_stacklevel())


class UnclaimedNames:
    """Names in a snapshot that this rank's `into` lacks. They are an error if the `into` of every rank of the group lacks them."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._bits: bytes = b""

    def note(self, every: Iterable[str], unclaimed: Sequence[str]) -> None:
        """`every`: all paths of the snapshot, in its order."""
        if unclaimed:
            self._paths = list(every)
            missing = set(unclaimed)
            self._bits = np.packbits(np.array([path in missing for path in self._paths])).tobytes()

    def record(self) -> bytes:
        """The message to other ranks: empty, or a bit for each path."""
        return self._bits

    def require_claimed(self, records: Sequence[bytes]) -> None:
        """Compares the records of all ranks. Raises `MismatchError` if a name is unclaimed on all ranks."""
        if not self._bits or any(len(record) != len(self._bits) for record in records):
            return
        nowhere = np.bitwise_and.reduce(np.array([np.frombuffer(record, np.uint8) for record in records]), axis=0)
        names = [self._paths[at] for at in np.flatnonzero(np.unpackbits(nowhere)).tolist()]
        if names:
            raise MismatchError(
                f"the snapshot does not fit `into`; {len(names)} not expected by `into` on any rank: {listed(names)}. To load a part, "
                "`store.checkout(address, into=...)` takes rename=, select= and strict=False (the tensors of `into` are now undefined: "
                "restore into it again)",
                object_id=names[0],
            )
