"""How a restore tells what did not fit: as an error, in a report, or as a warning."""

import warnings
from dataclasses import dataclass, field

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.state.select import listed


class LoadWarning(UserWarning):
    """A restore with ``strict=False`` left something out."""


@dataclass
class LoadReport:
    """What did not fit. Pass one as ``report=`` to have it filled."""

    missing: list[str] = field(default_factory=list)
    """Names in `into` that the snapshot does not have; they stay as they were."""
    unexpected: list[str] = field(default_factory=list)
    """Names in the snapshot that `into` does not have."""
    mismatched: list[str] = field(default_factory=list)
    """Names of another shape or dtype, and why; they stay as they were."""

    def settle(self, *, strict: bool, report: "LoadReport | None") -> None:
        """Fills `report`; then raises if `strict`, or warns if nobody asked for a report.

        Raises:
            MismatchError: something did not fit, and `strict`.
        """
        if report is not None:
            report.missing[:], report.unexpected[:], report.mismatched[:] = self.missing, self.unexpected, self.mismatched
        parts = [
            f"{len(names)} {what}: {listed(names)}"
            for what, names in (
                ("missing in the snapshot", self.missing),
                ("not expected by `into`", self.unexpected),
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
            warnings.warn(message, LoadWarning, stacklevel=4)
