"""What another rank's error is, by what an aborted attempt tells of it: for as long as attempts do not raise it by themselves."""

import re
from typing import Final

from tensorstore_ck import errors

_TOLD: Final = re.compile(r"was aborted: ranks? [\d, .-]+(?:\(\d+ in all\))?: (?P<kind>\w+Error): (?P<text>.*)", re.DOTALL)


def as_told(error: errors.StoreError) -> errors.StoreError:
    """The error that ended an attempt, as the rank that failed has raised it; any other one as it is."""
    found = _TOLD.search(str(error)) if type(error) is errors.SnapshotAbortedError else None
    kind = getattr(errors, found["kind"], None) if found else None
    if found is None or kind is None:
        return error
    told: errors.StoreError = kind(str(error).replace("; nothing needs to be cleaned up, try again", ""), object_id=error.object_id)
    told.__cause__ = error
    return told
