"""The layouts of a handle's last saves. A state whose structure did not change gets the same layout again, with all that was made from it.

Making the specs, the encoding and the write plan of 20,000 tensors costs more than reading their bytes, most of it for garbage collection.
"""

from typing import Final

from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.format.layout import Layout
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.state.tensor_table import TensorSpecs

MAX_LAYOUTS: Final = 4


class RecentLayouts:
    """Layouts that are kept."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[object, ...], Layout]] = []
        """With their keys, the last one first. A list never changes: threads that save at the same time read it."""

    def reuse(self, captured: CapturedState) -> CapturedState:
        """The same state; with an equal layout that is kept, if there is one. Keeps its own layout otherwise.

        Raises:
            UnsupportedValueError: the layout cannot be stored.
        """
        own = captured.own and captured.own._replace(layout=self._known(captured.own.layout))
        return captured._replace(layout=self._known(captured.layout), own=own)

    def _known(self, layout: Layout) -> Layout:
        specs = layout.tensors
        if not isinstance(specs, TensorSpecs):
            return layout
        # The tree as bytes: 1, 1.0 and True are equal keys of a dict, but different ones of a layout.
        key = (specs.names, specs.forms, pack_body(layout.tree), layout.storages, layout.meshes, layout.spreads)
        recent = self._kept
        found = next((entry for entry in recent if entry[0] == key), (key, layout))
        self._kept = [found, *(entry for entry in recent if entry is not found)][:MAX_LAYOUTS]
        return found[1]
