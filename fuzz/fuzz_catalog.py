"""Catalogs: a database of unknown origin, and conditions, also of triggers. An input is the file; its last line is a condition."""

import tempfile
from contextlib import suppress
from pathlib import Path

import atheris
from _common import fuzz

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.catalog import Catalog
    from tensorstore_ck.common.metric_condition import condition as metric_condition
    from tensorstore_ck.errors import StoreError

FILE = Path(tempfile.mkdtemp(prefix="fuzz-catalog-")) / "catalog.db"


def target(data: bytes) -> None:
    for left in FILE.parent.iterdir():
        left.unlink()
    FILE.write_bytes(data)
    condition = data.rpartition(b"\n")[2].decode(errors="replace")
    with suppress(StoreError):
        metric_condition(condition)({"step": 1.0})
    with suppress(StoreError), Catalog(FILE) as catalog:
        with suppress(StoreError):
            catalog.stores()
        for text in ("", condition):
            with suppress(StoreError):
                catalog.find(text)


if __name__ == "__main__":
    fuzz("catalog", target)
