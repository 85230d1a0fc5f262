"""Sets and removes quotas."""

from tensorstore_ck.common.units import parse_bytes
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.log import Op, RefTable
from tensorstore_ck.log.field_checks import is_ref_glob
from tensorstore_ck.log.quota import Quota


def set_quota(engine: Engine, glob: str, *, warn: int | str | None, refuse: int | str | None) -> Quota:
    """See `Store.set_quota`."""
    if not is_ref_glob(glob):
        raise InvalidOptionError(f"{glob!r} matches no ref: write a name, with * for any characters, such as runs/*", object_id=str(glob))
    warn_bytes = None if warn is None else parse_bytes(warn, "warn")
    refuse_bytes = None if refuse is None else parse_bytes(refuse, "refuse")
    if warn_bytes is None and refuse_bytes is None:
        raise InvalidOptionError("a quota needs warn= or refuse=, such as refuse='2TB'", object_id="refuse")
    if warn_bytes is not None and refuse_bytes is not None and warn_bytes > refuse_bytes:
        raise InvalidOptionError(f"a quota warns before it refuses: warn={warn!r} is more than refuse={refuse!r}", object_id="warn")
    engine.log.append(lambda _: [Op.quota(glob, warn_bytes, refuse_bytes)])
    return Quota(glob, warn_bytes, refuse_bytes, engine.log.view().added_bytes_of(glob))


def remove_quota(engine: Engine, glob: str) -> None:
    """See `Store.remove_quota`."""

    def build(view: RefTable) -> list[Op]:
        if glob not in view.quotas():
            raise NotFoundError(f"there is no quota for {glob!r}: see `tsck quota`", object_id=glob)
        return [Op.quota(glob, None, None)]

    engine.log.append(build)
