"""Quotas: what the snapshots of some branches may add to the store.

A save to a branch whose quota is used up is refused, and a save that nearly uses it up warns. The bytes are those of the fold, so no save
lists the store for this. A quota is checked before a save writes anything, and again at the head where the save is published: of several
writers one may cross the limit, and none goes on beyond it.
"""

import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tensorstore_ck.common.units import human_bytes, typed_bytes
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import QuotaExceededError
from tensorstore_ck.log.ref_table import RefTable


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
        given = (("warn", self.warn_bytes), ("refuse", self.refuse_bytes))
        limits = [f"{name} {typed_bytes(size)}" for name, size in given if size is not None]
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
    return {glob: Quota(glob, *row[:3]) for glob, row in view.quotas().items()}


class QuotaWarning(UserWarning):
    """The quota of a branch is nearly used up. Each open store warns once for a branch and a quota."""


def quotas_of(view: RefTable, ref: str) -> list[Quota]:
    """The quotas that apply to a branch."""
    return [Quota(glob, *row[:3]) for glob, row in view.quotas().items() if fnmatchcase(ref, glob)]


def check_quotas(view: RefTable, ref: str) -> list[Quota]:
    """Refuses a save to a branch if one of its quotas is used up; returns the quotas.

    Raises:
        QuotaExceededError: the message says which quota, how much is used, and what to do.
    """
    quotas = quotas_of(view, ref)
    for quota in quotas:
        if quota.refuse_bytes is not None and quota.used_bytes >= quota.refuse_bytes:
            raise QuotaExceededError(
                f"saves to {ref!r} are refused: the quota for {quota.glob!r} is {human_bytes(quota.refuse_bytes)}, and its snapshots use "
                f"{human_bytes(quota.used_bytes)}. Forget some (`tsck forget`, `tsck policy apply`): they count until `tsck gc` has "
                f"ended their undo windows, a day later. Or set a higher quota (`tsck quota set {shlex.quote(quota.glob)} --refuse SIZE`)",
                object_id=ref,
            )
    return quotas


def warn_of_quotas(url: str, quotas: Sequence[Quota], ref: str, new_bytes: int, warned: set[tuple[str, str]]) -> None:
    """Warns if a save of `new_bytes` nearly uses up one of the `quotas` of its branch; `warned`: (branch, glob) of earlier warnings."""
    for quota in quotas:
        used_bytes, key = quota.used_bytes + new_bytes, (ref, quota.glob)
        if quota.warn_bytes is not None and used_bytes >= quota.warn_bytes and key not in warned:
            warned.add(key)
            limit = "no save is refused" if quota.refuse_bytes is None else f"saves are refused from {human_bytes(quota.refuse_bytes)} on"
            warnings.warn(
                f"the snapshots of {quota.glob!r} use {human_bytes(used_bytes)}, and their quota warns from "
                f"{human_bytes(quota.warn_bytes)} on; {limit}: see `tsck quota -s {shlex.quote(url)}`",
                QuotaWarning,
                stacklevel=user_stacklevel(),
            )
