"""A small store of which an object was forged or damaged, and the calls of `hostile_calls` on it. An input is the seed of the change."""

import random

import atheris
from _common import fuzz

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.common import threads
    from tests.gc.stores import open_store
    from tests.store.hostile_calls import require_only_our_errors
    from tests.store.hostile_objects import REF, hostile, pristine, template


def start(self: threads.Helper) -> None:
    raise RuntimeError("one thread: what an input does is the same each time")


def target(data: bytes) -> None:
    require_only_our_errors(lambda: open_store(hostile(random.Random(data))), REF, "a hostile store")


if __name__ == "__main__":
    threads.Helper.start = start  # type: ignore[method-assign]
    pristine(), template()
    fuzz("store", target, peak_bytes=800 << 20)
