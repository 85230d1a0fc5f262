"""docs/requirements.md has a row for each of the 101 points, and names tests and figures that exist."""

import re

import pytest

from tests.documents import DOCS, REPOSITORY, text

PAGE = DOCS / "requirements.md"
RESULTS = REPOSITORY / "benches" / "RESULTS.md"
STATES = ("holds", "simulated", "one host", "partly", "missed", "missing", "none")
ROW = re.compile(r"\| (\d+) \| (.+?) \| (.*?) ?\| (.*?) ?\| (.+?) \|")
ROWS = {int(number): rest for number, *rest in (match.groups() for match in map(ROW.fullmatch, text(PAGE).splitlines()) if match)}
"""Number -> asked, where, evidence, state."""


def test_there_is_a_row_for_each_point_in_order() -> None:
    rows = [line for line in text(PAGE).splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == len(ROWS)
    assert [*ROWS] == [*range(1, 102)]


@pytest.mark.parametrize("number", ROWS)
def test_a_row_names_tests_and_figures_that_exist(number: int) -> None:
    asked, where, evidence, state = ROWS[number]
    assert state.startswith(STATES), asked
    named = re.findall(r"(R: )?`([^`]+)`", evidence)
    tests, figures = ([name for is_figure, name in named if bool(is_figure) is wanted] for wanted in (False, True))
    for test in tests:
        path, _, name = test.partition("::")
        assert path.startswith("tests/"), test
        assert (REPOSITORY / path).is_file(), test
        assert not name or re.search(rf"^def {name}\(", text(REPOSITORY / path), re.MULTILINE), test
    headings = re.findall(r"^#+ (.+?)(?: \(\d{4}-\d\d-\d\d\))?$", text(RESULTS), re.MULTILINE)
    assert [figure for figure in figures if figure not in headings] == []
    if not state.startswith(("missing", "none")):
        assert tests or figures, asked
        assert where, asked
    if state.startswith("holds"):
        assert tests, f"{asked}: a point that holds has a test"
