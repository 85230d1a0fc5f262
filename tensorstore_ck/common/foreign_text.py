"""Parses JSON and TOML of unknown origin. Text that cannot be parsed, or would take long, raises a ValueError and no other error."""

import json
import tomllib
from typing import Any, Final

MAX_TOML_BYTES: Final = 1 << 17
MAX_DOTS: Final = 1000
"""In one line of TOML: `tomllib` takes quadratic time for the parts of a key."""


def parse_json(data: str | bytes, **hooks: Any) -> Any:
    """The value of a JSON text; `hooks` as of `json.loads`.

    Raises:
        ValueError: it is no JSON, or nested too deep.
    """
    try:
        return json.loads(data, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_toml(data: bytes) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        ValueError: it is no TOML, nested too deep, or longer than people write it.
    """
    if len(data) > MAX_TOML_BYTES:
        raise ValueError(f"it has more than {MAX_TOML_BYTES:,} bytes")
    if any(line.count(b".") > MAX_DOTS for line in data.splitlines()):
        raise ValueError(f"it has a line with more than {MAX_DOTS:,} dots")
    try:
        return tomllib.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deep") from None
