"""What a put that finds no space tells its user: what gc can free, in gc's own words."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import NoSpaceError, StoreError
from tensorstore_ck.gc.plan import plan_gc


@contextmanager
def freeable_said(engine: Engine) -> Iterator[None]:
    """Adds to a `NoSpaceError` of the store's folder what gc frees now, and what later. A store elsewhere is not listed for that."""
    try:
        yield
    except NoSpaceError as exc:
        if engine.tier is not None or not engine.backend.is_local:
            raise
        said: list[str] = []
        with suppress(StoreError, OSError):  # the cache may have no space, either
            said = plan_gc(engine.of_store()).freeable.describe()
        if not said:
            raise
        raise NoSpaceError(". ".join([str(exc), *said]), object_id=exc.object_id) from exc
