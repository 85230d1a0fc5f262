"""Saves and quotas: a save to a branch whose quota is used up is refused, and one that comes near it warns.

The bytes are those of the fold, so no save lists the store for this. Checked before a save writes anything, and again at the head where it
is published: of several writers one may cross the limit, and none goes on beyond it.
"""

import shlex
import warnings

from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import QuotaExceededError
from tensorstore_ck.format.record import Record
from tensorstore_ck.log import RefTable
from tensorstore_ck.log.quota import quotas_of


class QuotaWarning(UserWarning):
    """Saves to a branch come near its quota. Each open store says so once for a branch and a quota."""


def check_quotas(view: RefTable, ref: str) -> None:
    """Refuses a save to a branch whose quota is used up.

    Raises:
        QuotaExceededError: the message says which quota, how much is used, and what to do.
    """
    for quota in quotas_of(view, ref):
        if quota.refuse_bytes is not None and quota.used_bytes >= quota.refuse_bytes:
            raise QuotaExceededError(
                f"saves to {ref!r} are refused: the quota for {quota.glob!r} is {human_bytes(quota.refuse_bytes)}, and its snapshots use "
                f"{human_bytes(quota.used_bytes)}. Forget some (`tsck forget`, `tsck policy apply`) and end their undo windows "
                f"(`tsck gc --undo-window 0s`), or set a higher quota (`tsck quota set {shlex.quote(quota.glob)} --refuse SIZE`)",
                object_id=ref,
            )


def warn_of_quotas(engine: Engine, view: RefTable, record: Record) -> None:
    """Warns if the quota of a branch is nearly used up once `record` is published."""
    for quota in quotas_of(view, record.ref):
        used_bytes, key = quota.used_bytes + record.new_bytes, (record.ref, quota.glob)
        if quota.warn_bytes is not None and used_bytes >= quota.warn_bytes and key not in engine.warned_quotas:
            engine.warned_quotas.add(key)
            limit = "no save is refused" if quota.refuse_bytes is None else f"saves are refused from {human_bytes(quota.refuse_bytes)} on"
            warnings.warn(
                f"the snapshots of {quota.glob!r} use {human_bytes(used_bytes)}, and their quota warns from "
                f"{human_bytes(quota.warn_bytes)} on; {limit}: see `tsck quota -s {shlex.quote(engine.backend.url)}`",
                QuotaWarning,
                stacklevel=2,
            )
