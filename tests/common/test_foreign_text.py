"""JSON and TOML of unknown origin."""

import re
from pathlib import Path

import pytest

import tensorstore_ck
from tensorstore_ck.common.foreign_text import MAX_TOML_BYTES, parse_json, parse_toml

PACKAGE = Path(tensorstore_ck.__file__).parent


def test_what_is_parsed() -> None:
    assert parse_json(b'{"a": [1, "x"]}') == {"a": [1, "x"]}
    assert parse_toml(b'a.b = 1\nc = ["d.e.f"]') == {"a": {"b": 1}, "c": ["d.e.f"]}


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a":' * 100_000, "1" * 5000, "\ud800"])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of any words
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a = ", "Invalid value"),
        (b"\xff", "decode"),
        (b"a = " + b"[" * 100_000, "nested too deep"),
        (b"a = 1\n" + b"b." * 2000 + b"c = 1", "a line with more than 1,000 dots"),
        (b"#" * MAX_TOML_BYTES + b"\n", "more than 131,072 bytes"),
    ],
)
def test_what_is_no_toml(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_toml(text)


def test_nothing_else_parses_json_or_toml() -> None:
    """`redaction` is below `common`, and the standalone reader has no package."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"json\.loads?\(|JSONDecoder|tomllib\.", path.read_text(encoding="utf-8"))
    }
    assert found == {"common/foreign_text.py", "redaction.py", "standalone/tsck_read.py"}
