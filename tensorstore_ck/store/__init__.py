"""The public classes: names, signatures and docstrings. Each method is one call into `session`, `maintenance` or `gc`.

read_only_store.py  `ReadOnlyStore`: restores, and looks
store.py            `Store`: saves, refs, what stays and what goes, upkeep
opening.py          `open`
internals.py        what the areas above need of a store beyond its public methods

Modules that take long to import, such as torch, are imported only by the methods that need them, so that a command starts fast.
"""

from tensorstore_ck.engine.write.request import ANY, LAST_SEEN
from tensorstore_ck.store.opening import OpenOptions, open  # noqa: A004 - as in `opening`
from tensorstore_ck.store.read_only_store import ReadOnlyStore
from tensorstore_ck.store.store import Store

open_store = open

__all__ = ["ANY", "LAST_SEEN", "OpenOptions", "ReadOnlyStore", "Store", "open", "open_store"]
