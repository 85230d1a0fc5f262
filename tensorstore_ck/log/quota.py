"""Quotas: what the snapshots of some branches may add to the store. Pure reads of the ref table."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tensorstore_ck.common.units import human_bytes, typed_bytes
from tensorstore_ck.log.ref_table import RefTable
from tensorstore_ck.log.table_rows import QuotaRow


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit of what branches add to the store, and how much of it is used."""

    glob: str
    """The branches that it applies to."""
    warn_bytes: int | None
    """From here on saves warn; None: they do not."""
    refuse_bytes: int | None
    """From here on saves are refused; None: they are not."""
    used_bytes: int
    """Bytes that saves to these branches added to the store, of snapshots that a branch, tag, pin or undo window still holds."""

    def __repr__(self) -> str:
        limits = [
            f"{name} {typed_bytes(size)}" for name, size in (("warn", self.warn_bytes), ("refuse", self.refuse_bytes)) if size is not None
        ]
        return f"Quota({self.glob!r}, {', '.join(limits)}: {human_bytes(self.used_bytes)} used, {self.state})"

    @property
    def state(self) -> str:
        """What the next save does: ``ok``, ``warn`` or ``refuse``."""
        if self.refuse_bytes is not None and self.used_bytes >= self.refuse_bytes:
            return "refuse"
        return "warn" if self.warn_bytes is not None and self.used_bytes >= self.warn_bytes else "ok"

    @property
    def share(self) -> float:
        """Used bytes divided by the refuse limit, or without one by the warn limit: 1.0 at the limit; infinite for a limit of 0."""
        limit = self.refuse_bytes if self.refuse_bytes is not None else self.warn_bytes
        return self.used_bytes / limit if limit else float("inf")


def all_quotas(view: RefTable) -> dict[str, Quota]:
    """Glob -> quota."""
    return {glob: _of_row(glob, row) for glob, row in view.quotas().items()}


def quotas_of(view: RefTable, ref: str) -> Iterator[Quota]:
    """The quotas that apply to a branch."""
    for glob, row in view.quotas().items():
        if fnmatchcase(ref, glob):
            yield _of_row(glob, row)


def _of_row(glob: str, row: QuotaRow) -> Quota:
    return Quota(glob, row.warn_bytes, row.refuse_bytes, row.used_bytes)
