"""Torch files with a pickle of one's own."""

import zipfile
from pathlib import Path
from typing import Any


def archive(path: Path, code: bytes, records: dict[str, bytes] | None = None, **options: Any) -> Path:
    """A torch file with this pickle."""
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("a/data.pkl", code)
        for name, data in {"version": b"3\n", "byteorder": b"little", **(records or {})}.items():
            file.writestr(f"a/{name}", data)
    return path
