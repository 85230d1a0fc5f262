"""How a restore tells what did not fit: as an error, in a report, or as a warning."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.redaction import one_line
from tensorstore_ck.state.select import listed


class LoadWarning(UserWarning):
    """A restore with ``strict=False`` left something out; or tensors that are one here are several in the snapshot, and not equal."""


@dataclass
class LoadReport:
    """What did not fit. Pass one as ``report=`` to have it filled."""

    missing: list[str] = field(default_factory=list)
    """Names in `into` that the snapshot does not have; they stay as they were."""
    unexpected: list[str] = field(default_factory=list)
    """Names in the snapshot that `into` does not have."""
    mismatched: list[str] = field(default_factory=list)
    """Names of another shape or dtype, and why; they stay as they were."""

    def settle(self, *, strict: bool, report: "LoadReport | None", others: bool = False) -> None:
        """Fills `report`; then raises if `strict`, or warns if nobody asked for a report.

        `others`: what is unexpected here may have its place on other ranks, see `UnclaimedNames`.

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
            raise MismatchError(f"{message}. Use rename=, select= or strict=False to load a part", object_id=first)
        if report is None:
            warnings.warn(one_line(message), LoadWarning, stacklevel=4)


class UnclaimedNames:
    """What of a snapshot has no place in the `into` of this rank. When that is so on all ranks of a group, nobody expected it."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._places: bytes = b""

    def note(self, every: Iterable[str], unclaimed: Sequence[str]) -> None:
        """`every`: the paths of all that the snapshot holds, in its order."""
        if unclaimed:
            self._paths = list(every)
            missing = set(unclaimed)
            self._places = np.packbits(np.array([path in missing for path in self._paths])).tobytes()

    def record(self) -> bytes:
        """What other ranks are told: nothing, or a bit for each path."""
        return self._places

    def require_claimed(self, records: Sequence[bytes]) -> None:
        """Compares the records of all ranks.

        Raises:
            MismatchError: something has no place on any rank.
        """
        if not self._places or any(len(record) != len(self._places) for record in records):
            return
        nowhere = np.bitwise_and.reduce(np.array([np.frombuffer(record, np.uint8) for record in records]), axis=0)
        names = [self._paths[at] for at in np.flatnonzero(np.unpackbits(nowhere)).tolist()]
        if names:
            raise MismatchError(
                f"the snapshot does not fit `into`; {len(names)} not expected by `into` on any rank: {listed(names)}. Use rename=, "
                "select= or strict=False to load a part (the tensors of `into` are now undefined: restore into it again)",
                object_id=names[0],
            )
