"""docs/security.md: each test that it names, as what holds a promise, is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"`(tests/[\w/]+\.py|\.\.\.)?::(test_\w+)")


def test_each_promise_names_a_test_that_is_there() -> None:
    found, missing, path = 0, [], ""
    for named, function in NAMED.findall((ROOT / "docs/security.md").read_text()):
        path = path if named in ("", "...") else named
        found += 1
        if f"def {function}(" not in (ROOT / path).read_text():
            missing.append(f"{path}::{function}")
    assert found > 40
    assert not missing
