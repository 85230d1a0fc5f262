"""Every kind of error has its entry in docs/troubleshooting.md, and its message on the command line leads there."""

import re
import tomllib

import pytest

from tensorstore_ck import errors
from tensorstore_ck.cli.command_groups import TROUBLESHOOTING
from tests import documents

TEXT = documents.text(documents.DOCS / "troubleshooting.md")
ENTRIES = {found[1]: found[2] for found in re.finditer(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)}


def test_there_is_an_entry_for_each_kind_and_no_other() -> None:
    assert set(ENTRIES) == set(errors.BY_KIND)


@pytest.mark.parametrize("kind", errors.BY_KIND)
def test_an_entry_has_the_code_the_cause_and_the_next_step(kind: str) -> None:
    error = errors.BY_KIND[kind]
    assert ENTRIES[kind].startswith(f"\n`{error.__name__}`, exit code {error.exit_code}, retry `{error.retry}`.\n\n**Cause.** ")
    assert re.search(r"^\*\*Next step\.\*\* .{20}", ENTRIES[kind], re.MULTILINE)


def test_an_error_knows_its_entry() -> None:
    urls = tomllib.loads((documents.REPOSITORY / "pyproject.toml").read_text())["project"]["urls"]
    assert errors.ConflictError("x").help_url == f"{urls['Troubleshooting']}#conflict"
    assert urls["Troubleshooting"].endswith("/docs/troubleshooting.md")


def test_the_page_that_tsck_help_prints_is_this_one() -> None:
    assert TROUBLESHOOTING.read_text("utf-8") == TEXT
