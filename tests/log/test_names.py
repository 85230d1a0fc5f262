"""Names of branches and tags."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensorstore_ck.errors import InvalidNameError
from tensorstore_ck.log import validate_ref_name


@pytest.mark.parametrize(
    "name", ["a", "main", "runs/gpt-2", "v1.0", "A/b/c/d/e/f/g/h/i", "x" * 128, "0", "1234567", "beef", "deadbeefg", "a.lock.b"]
)
def test_good_names(name: str) -> None:
    assert validate_ref_name(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "parts"),
        ("/a", "parts"),
        ("a/", "parts"),
        ("a//b", "parts"),
        (".hidden", "parts"),
        ("-x", "parts"),
        ("a b", "parts"),
        ("a@1", "parts"),
        ("a~1", "parts"),
        ("a\n", "parts"),
        ("a\0", "parts"),
        ("caf\u00e9", "parts"),
        ("cafe\u0301", "parts"),
        ("\uff41", "parts"),
        ("a/b/c/d/e/f/g/h/i/j", "parts"),
        ("x" * 129, "parts"),
        ("/".join(["x" * 100] * 3), "longer than 255"),
        ("a..b", "'..'"),
        ("a/b.lock", "'.lock'"),
        ("a.lock/b", "'.lock'"),
        ("deadbeef", "root"),
        ("DEADBEEF", "root"),
        ("0" * 64, "root"),
        ("12345678", "root"),
        (None, "NoneType"),
        (7, "int"),
        (b"main", "bytes"),
    ],
)
def test_bad_names_and_why(name: object, why: str) -> None:
    with pytest.raises(InvalidNameError, match="cannot be the name of a branch or tag") as caught:
        validate_ref_name(name)
    assert why in str(caught.value)
    assert "runs/gpt-2" in str(caught.value)


@settings(max_examples=50)
@given(st.text("aZ09./-_@~\\\n\0\u00e9\uff41", max_size=20))
@example("0" * 65)
def test_any_text_is_good_or_refused(name: str) -> None:
    try:
        validate_ref_name(name)
    except InvalidNameError:
        return
    assert name.isascii()
    assert not set(name) & set("@~ \0\\\n")
    assert ".." not in name
