"""When gc frees what fsck found that nothing refers to: by gc's own plan, made at most once, and only if there is such an object."""

import contextlib

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import StoreError
from tensorstore_ck.gc.plan import GcPlan, plan_gc
from tensorstore_ck.gc.report import Freeable
from tensorstore_ck.log import ObjectKey, RefTable


def why_unreferenced(view: RefTable, key: ObjectKey) -> str:
    """Why nothing refers to an object, as far as the log says."""
    if view.object_state(key) is not None:
        return "nothing needs it any more"
    if key.kind == "pack" and view.relocations(key.ulid):
        return "nothing refers to it any more: its blocks are in other packs"
    return "nothing refers to it: an interrupted save left it, or one is under way"


class FreeableObjects:
    """What gc would do now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plan: GcPlan | None = None
        self._has_plan = False

    @property
    def freeable(self) -> Freeable | None:
        """What gc frees; None where that was not asked for any object, or gc cannot run."""
        return self._plan.freeable if self._plan is not None else None

    def when(self, key: ObjectKey) -> str:
        """When gc frees an object, as gc says it."""
        if not self._has_plan:
            self._has_plan = True
            with contextlib.suppress(StoreError):  # where gc cannot run, something else is found, which says so
                self._plan = plan_gc(self._engine)
        plan = self._plan
        if plan is None:
            return "; gc frees it when what is damaged has been repaired"
        if key in plan.young:
            return f"; gc frees it {plan.when_old(key)}"
        return f"; `{plan.freeable.command}` frees it" if key in plan.doomed else ""
