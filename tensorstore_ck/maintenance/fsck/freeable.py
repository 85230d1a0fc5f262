"""When gc frees the unreferenced objects that fsck found, by gc's own plan; it is made at most once, and only if needed."""

import contextlib

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import StoreError
from tensorstore_ck.gc.plan import GcPlan, plan_gc
from tensorstore_ck.gc.report import Freeable
from tensorstore_ck.log import ObjectKey, RefTable


def why_unreferenced(view: RefTable, key: ObjectKey) -> str:
    """Why nothing refers to an object, according to the log."""
    if view.object_state(key) is not None:
        return "nothing needs it any more"
    if key.kind == "pack" and view.relocations(key.ulid):
        return "nothing refers to it any more: its blocks are in other packs"
    return "nothing refers to it: it belongs to an interrupted or a running save"


class FreeableObjects:
    """The objects that gc would free now or later."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plan: GcPlan | None = None
        self._has_plan = False

    @property
    def freeable(self) -> Freeable | None:
        """The part of a report that says what gc can free; None if `when` was never called, or gc cannot run."""
        return self._plan.freeable if self._plan is not None else None

    def when(self, key: ObjectKey) -> str:
        """When gc frees an object."""
        if not self._has_plan:
            self._has_plan = True
            with contextlib.suppress(StoreError):  # if gc cannot run, another finding says why
                self._plan = plan_gc(self._engine)
        plan = self._plan
        if plan is None:
            return "; gc frees it after the damage has been repaired"
        if key in plan.young:
            return f"; gc frees it {plan.when_old(key)}"
        return f"; `{plan.freeable.command}` frees it" if key in plan.doomed else ""
