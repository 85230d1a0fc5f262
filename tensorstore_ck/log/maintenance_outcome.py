"""The outcome of a run of gc or fsck, as noted in the log."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tensorstore_ck.common.html_table import html_table
from tensorstore_ck.log.ref_table import RefTable
from tensorstore_ck.redaction import one_line

OK: Final = "ok"
FINDINGS: Final = "findings"
REFUSED: Final = "refused"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of one run of gc or fsck."""

    run: str
    """``gc`` or ``fsck``."""
    outcome: str
    """``ok``; ``findings``: fsck found errors; ``refused``: gc did not begin, see `GcRefusedError`; ``failed``."""
    time_ns: int
    """When it ended: nanoseconds since 1970."""
    duration_seconds: float
    counts: Mapping[str, int]
    """What it did and found: see docs/guides/operations.md, "When they ran last"."""
    message: str
    """Why it was refused or failed; otherwise empty."""
    actor: str
    """Who ran it: ``user@host:pid``."""
    entry: int
    """The log entry that notes it."""

    @classmethod
    def of(cls, run: str, row: Any, counts: Mapping[str, int]) -> "RunOutcome":
        """From a row of the ref table or of a catalog."""
        return cls(
            run, row.outcome, row.time_ns, row.duration_ns / 1e9, counts=dict(counts), message=row.message, actor=row.actor, entry=row.n
        )

    def __repr__(self) -> str:
        return f"RunOutcome({one_line(self.run)}: {one_line(self.outcome)}, {self.time_ns} ns, entry {self.entry})"

    def _repr_html_(self) -> str:
        return html_table(repr(self), ("what", ""), [*self.counts.items(), *([("message", self.message)] if self.message else [])])

    @property
    def ok(self) -> bool:
        """Whether it ended, and found no error."""
        return self.outcome == OK


def last_runs(view: RefTable) -> dict[str, RunOutcome]:
    """``gc``, ``fsck`` -> the last run that the log has."""
    return {run: RunOutcome.of(run, row, row.counts) for run, row in view.reports().items()}
