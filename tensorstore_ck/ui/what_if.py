"""A dry run of a policy: the snapshots that it would expire, and the bytes that this frees."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.errors import StoreError
from tensorstore_ck.log.ref_names import is_ref_glob
from tensorstore_ck.log.retention import parse_rule
from tensorstore_ck.maintenance.apply_policies import BranchVerdicts, RetentionReport, SnapshotVerdict
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.sources import StoreKey

RULES: Final = (
    ("keep_last", "Newest", "5"),
    ("keep_every", "Each multiple of steps", "1000"),
    ("keep_every_seconds", "One in each period", "6h"),
    ("keep_best", "Best of a metric", "3:val_loss:min"),
    ("keep_steps", "These steps", "1000,5000"),
    ("keep_epochs", "Each multiple of epochs", "5"),
    ("keep_triggers", "What triggers saved", "every_epochs"),
    ("keep_milestones", "Milestones", "no"),
    ("keep_first", "The first", "yes"),
    ("keep_younger", "Younger than", "7d"),
    ("expire_after", "Limit: age", "30d"),
    ("max_bytes", "Limit: bytes", "2TB"),
)
"""Name, what it keeps, and an example."""
MAX_CHARS: Final = 4000
"""The most characters of a rule."""
MAX_ROWS: Final = 100


@dataclass(frozen=True, slots=True)
class Trial:
    """Rules, and what they would do."""

    glob: str
    rules: Mapping[str, str]
    """As they were typed."""
    error: str = ""
    report: RetentionReport | None = None
    command: str = ""
    """The command that sets these rules as a policy."""

    @property
    def fields(self) -> list[tuple[str, str, str, str]]:
        """The form: name, label, example, value."""
        return [(name, label, example, self.rules.get(name, "")) for name, label, example in RULES]

    @property
    def branches(self) -> tuple[BranchVerdicts, ...]:
        """The branches, those that would lose the most snapshots first."""
        branches = self.report.branches if self.report is not None else ()
        return tuple(sorted(branches, key=lambda branch: -sum(not snapshot.stays for snapshot in branch.snapshots)))

    def verdicts(self, *, stays: bool) -> list[tuple[str, SnapshotVerdict]]:
        """Branch and verdict of what stays or goes, the newest of each branch first."""
        return [(branch.ref, verdict) for branch in self.branches for verdict in reversed(branch.snapshots) if verdict.stays is stays]


def try_rules(pages: Pages, store: StoreKey, query: Mapping[str, str]) -> Trial:
    """The effect that the rules in a query would have; the empty form if it has none."""
    glob = query.get("branches", "").strip()
    rules = {name: text for name, _, _ in RULES if (text := query.get(name, "").strip())}
    if "branches" not in query:
        return Trial("*", {})
    if not is_ref_glob(glob):
        return Trial(glob, rules, f"{glob!r} matches no branch: write a name, with * for any characters, such as runs/*")
    too_long = next((name for name, text in rules.items() if len(text) > MAX_CHARS), None)
    if too_long is not None:
        return Trial(glob, {}, f"{too_long} is longer than {MAX_CHARS:,} characters")
    try:
        parsed = {name: parse_rule(name, text) for name, text in rules.items()}
        report = pages.sources.open(store).apply_policies(dry_run=True, rules=parsed, glob=glob)
    except StoreError as exc:
        return Trial(glob, rules, str(exc))
    words = [f"{name}={text}" for name, text in rules.items()]
    return Trial(glob=glob, rules=rules, error="", report=report, command=pages.command(store, "policy", "set", glob, *words))
