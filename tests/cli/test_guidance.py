"""Where the command line leads on: exit codes, commands that are not there, options before the command, and the commands in messages."""

import ast
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import tensorstore_ck
from tensorstore_ck import errors
from tensorstore_ck.cli.app import HELP
from tensorstore_ck.cli.command_groups import GROUPS
from tensorstore_ck.common.extras import EXTRAS, missing_extra
from tests import documents
from tests.cli.conftest import Tsck
from tests.cli.everycommand import commands

PACKAGE = Path(tensorstore_ck.__file__).parent
EXIT_CODES = documents.text(documents.DOCS / "guides" / "exit-codes.md")
KINDS = {found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, errors.StoreError)}


# --- exit codes -------------------------------------------------------------------------------------------------------


def expected_codes() -> dict[int, str]:
    return {0: "", 2: "usage", 130: "interrupted", **{kind.exit_code: kind.kind for kind in KINDS}}


def test_every_kind_has_a_code_of_its_own() -> None:
    assert len(expected_codes()) == len({*expected_codes().values()}) == len(KINDS) + 3


def test_the_page_of_exit_codes_has_all() -> None:
    rows = re.findall(r"^\| (\d+) \| (?:`(\w+)`)? \| (?:`(\w+)`)? \| (.+) \|$", EXIT_CODES, re.MULTILINE)
    assert {int(code): kind for code, kind, _, _ in rows} == expected_codes()
    assert [int(code) for code, _, _, _ in rows] == sorted(expected_codes())
    told = {int(code): (retry, meaning) for code, _, retry, meaning in rows}
    for kind in KINDS - {errors.StoreError}:
        assert told[kind.exit_code] == (kind.retry, (kind.__doc__ or "").splitlines()[0])


def test_help_has_all_exit_codes(tsck: Tsck) -> None:
    assert "`tsck help exit-codes`" in tsck("--help").out
    table = tsck("help", "exit-codes").out
    rows = [(int(row[0]), row[1]) for row in re.findall(r"^ +(\d+)  (\w*) ", table, re.MULTILINE)]
    assert dict(rows) == expected_codes()


# --- commands that are not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "leads_to"),
    [
        (("list", "runs"), ["tsck branch", "tsck tag", "tsck log", "tsck show"]),
        (("lgo",), ["tsck log"]),
        (("forgt", "x"), ["tsck forget"]),
        (("frobnicate",), ["tsck --help"]),
    ],
)
def test_what_is_no_command_leads_to_one(tsck: Tsck, arguments: tuple[str, ...], leads_to: list[str]) -> None:
    done = tsck(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done
    assert all(f"`{command}" in done.err for command in leads_to), done.err
    assert tsck(*arguments, "--json").json["error"]["kind"] == "usage"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lgo", "tsck: There is no command 'lgo': did you mean `tsck log`? See `"),
        ("log --lmit 3", "tsck: No such option '--lmit': did you mean one of: '--limit', '--plot'? See `"),
        ("show", "tsck: Missing argument 'ADDRESS'. See `"),
        ("policy set runs/*", "`set` needs at least one RULE=VALUE, such as keep_last=3"),
        ("policy set runs/* keep_lst=3", "there is no rule 'keep_lst': did you mean keep_last? There are expire_after, "),
        ("show runs/tset", "no ref or snapshot 'runs/tset' (refs: runs/test, "),
        ("show runs/test~9", "'runs/test~9': 'runs/test' has one snapshot before it; see `tsck log runs/test -s "),
        (
            "log -s kc",
            "there is no store at {folder}/kc: create one with `tsck init {folder}/kc`, or open(..., create=True); there is a store at ck ",
        ),
    ],
)
def test_what_is_mistyped_leads_to_what_was_meant(history: Tsck, tmp_path: Path, line: str, said: str) -> None:
    for name in ("runs/test", "runs/a"):
        history("branch", name, "runs/gpt")
    done = history(*line.split())
    assert said.format(folder=tmp_path) in done.err


def test_in_a_folder_above_stores_they_are_named(history: Tsck, tmp_path: Path) -> None:
    done = history("log", store=None)
    assert (done.code, done.err.count("\n")) == (30, 1)
    assert "(this one holds no store.json); there is a store at ck (see: " in done.err
    for name in ("b", "c", "d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "store.json").touch()
    assert "there are stores at b c ck (see: " in history("log", store=None).err
    assert "did you mean" not in history("copy", "nope", "ck").err, "a store stands there rightly"


@pytest.mark.parametrize("group", GROUPS)
def test_help_of_a_group_describes_its_commands(tsck: Tsck, group: str) -> None:
    described = re.findall(r"^  (\S+)  +\S", tsck("help", group).out, re.MULTILINE)
    assert described == [*GROUPS[group][1]]
    assert tsck("help", group).code == 0


def test_help_of_a_kind_is_its_entry_without_links(tsck: Tsck) -> None:
    for kind in errors.BY_KIND:
        done = tsck("help", kind)
        assert (done.code, done.err) == (0, ""), kind
        assert done.out.startswith(f"{kind}\n\n`{errors.BY_KIND[kind].__name__}`, exit code {errors.BY_KIND[kind].exit_code}"), kind
        assert "Cause. " in done.out, kind
        assert "Next step. " in done.out, kind
        assert "](" not in done.out, kind
        assert all(len(line) <= 100 for line in done.out.splitlines()), kind


def test_help_and_version_are_commands_too(tsck: Tsck) -> None:
    assert tsck("help") == tsck("--help")
    assert tsck("version") == tsck("--version")
    assert tsck("help", "log") == tsck("log", "--help")
    assert tsck("help", "nope").code == 2


@pytest.mark.parametrize(
    "options", [("-s", "ck"), ("--store=ck",), ("-sck",), ("--store", "ck", "--json"), ("--cache-dir", "c", "-s", "ck")]
)
def test_options_before_the_command(history: Tsck, options: tuple[str, ...]) -> None:
    before = history(*options, "log", "runs/gpt", "-n", "1", store=None)
    after = history("log", "runs/gpt", "-n", "1", *options, store=None)
    assert before == after
    assert before.code == 0
    assert history("-s", "nowhere", "log").code == 30


def test_mark_as_in_python(history: Tsck) -> None:
    assert history("mark", "runs/gpt", "bad", "--reason", "spike").code == 0
    assert history("show", "runs/gpt", "--json").json["snapshot"]["mark"] == "bad"
    assert history("mark", "runs/gpt", "--clear").code == 0
    assert history("show", "runs/gpt", "--json").json["snapshot"]["mark"] == ""


def test_show_never_says_that_more_of_it_is_new_than_there_is(history: Tsck) -> None:
    snapshot = history("show", "runs/gpt~1", "--json").json["snapshot"]
    assert snapshot["new_bytes"] > snapshot["logical_bytes"], "a small state, and its index"
    (size,) = [line for line in history("show", "runs/gpt~1").out.splitlines() if line.startswith("size")]
    assert re.fullmatch(r"size +39\.1 KiB, stored as [\d.]+ KiB; the save made the store grow by [\d.]+ KiB", size)
    put = history("put", "model.safetensors", "--ref", "again").out
    assert re.search(r"\(39\.1 KiB; the store grew by [\d.]+ K?i?B\)$", put.strip())


# --- what is missing --------------------------------------------------------------------------------------------------


def test_extras_are_those_of_the_package() -> None:
    listed = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra: [*packages] for extra, packages in EXTRAS.items()} == listed


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_package_is_named(extra: str) -> None:
    message = str(missing_extra(extra, "this"))
    first, *others = re.findall(r"`(pip install [^`]*)`", message)
    assert shlex.split(first)[2:] == list(EXTRAS[extra])
    assert [shlex.split(other)[2] for other in others] == [f".[{extra}]", f"tensorstore_ck[{extra}]"]


# --- commands in messages ---------------------------------------------------------------------------------------------


def texts_of(path: Path) -> list[str]:
    """The text in a source file that names commands, with ``X`` for what is inserted at run time."""
    found: list[str] = []
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)) if "`tsck " in source else ():
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def commands_in(texts: list[str]) -> set[str]:
    """Of regular expressions that fit commands, nothing."""
    found = {" ".join(command.split()) for text in texts for command in re.findall(r"`tsck ([^`]+)`", text)}
    return {command for command in found if "[^" not in command}


def problem_of(command: str) -> str:
    """What `tsck` would not take of a command in a message; empty if nothing."""
    try:
        words = shlex.split(command)
    except ValueError:  # of a quote that is inserted at run time
        words = command.split()
    while words and words[0] in ("-s", "--store", "--no-pager"):
        words = words[1:] if words[0] == "--no-pager" else words[2:]
    if not words or not words[0].strip("X") or words[0] in ("--help", "--version"):
        return ""
    if words[0] == "help":
        topics = {*commands(), *GROUPS, "exit-codes", "GROUP", "COMMAND", "KIND", "TOPIC", "X"}
        return "" if {*words[1:]} <= topics else f"no help for {words[1]}"
    known = commands().get(words[0])
    if known is None:
        return f"there is no command {words[0]}"
    takes = {name for parameter in known.params if isinstance(parameter, click.Option) for name in (*parameter.opts, "--help")}
    wrong = [word for word in words[1:] if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in takes]
    return f"no option {wrong[0]}" if wrong else ""


def test_commands_in_messages_and_in_the_documentation_are_there() -> None:
    messages = commands_in([text for path in PACKAGE.rglob("*.py") for text in texts_of(path)])
    assert len(messages) > 25
    documented = set().union(*(documents.commands(page) for page in documents.PAGES))
    assert len(documented) > 50
    examples = {
        line.strip().removeprefix("tsck ")
        for command in commands().values()
        for line in (command.epilog or "").splitlines()
        if "tsck " in line
    }
    problems: dict[str, Any] = {command: found for command in messages | documented | examples if (found := problem_of(command))}
    assert not problems


def test_the_first_look_of_the_help_works_without_extras(tsck: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    torch.save({"w": torch.ones(3)}, "model.pt")
    look = re.findall(r"^  tsck (.*?)   ", HELP, re.MULTILINE)
    assert len(look) == 4
    for command in look:
        result = tsck(*shlex.split(command))
        assert result.code == 0, result.err
    assert torch.load("copy.pt", weights_only=True)["w"].equal(torch.ones(3))


def test_restore_is_no_typing_error_of_reset(history: Tsck) -> None:
    said = history("restore", "runs/gpt").err
    assert "`tsck get ADDRESS FILE`" in said
    assert "reset" not in said


@pytest.mark.parametrize(
    ("arguments", "store", "printed"),
    [
        (("find",), "ck", ["catalog sync STORE --db HERE/data/tensorstore_ck/catalog.sqlite"]),
        (("catalog", "show"), "ck", ["catalog sync STORE --db HERE/data/tensorstore_ck/catalog.sqlite"]),
        (("log",), "new", ["put FILE --ref NAME"]),
        (("branch",), "new", ["put FILE --ref NAME"]),
        (("tag",), "ck", ["tag NAME ADDRESS"]),
        (("tag", "x"), "ck", ["tag x runs/gpt~1", "tag --help"]),
        (("branch", "x"), "ck", ["branch x runs/gpt~1", "branch --help"]),
        (("log", "--frobnicate"), "ck", ["log --help"]),
        (("ls",), "ck", ["branch", "tag", "log", "show ADDRESS", "--help"]),
        (("rm", "runs/gpt"), "ck", ["forget ADDRESS", "undo", "--help"]),
        (("-s", "ck"), "ck", ["-s ./ckpt log", "--help"]),
    ],
)
def test_printed_commands_work(
    history: Tsck, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], store: str, printed: list[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(Path.cwd() / "data"))
    monkeypatch.delenv("TSCK_CATALOG", raising=False)
    history("init", "new")
    history("mark", "runs/gpt")
    Path("ckpt").symlink_to("ck")
    done = history(*arguments, store=store)
    found = re.findall(r"`(?:tsck|main) ([^`]+)`", done.out + done.err)  # click's runner calls the program main
    assert found == [each.replace("HERE", str(Path.cwd())) for each in printed], done
    values = {"FILE": "model.safetensors", "NAME": "runs/new", "ADDRESS": "runs/gpt", "STORE": "ck"}
    for command in found:
        again = history(*(values.get(word, word) for word in shlex.split(command)), store=store)
        assert again.code == 0, (command, again)
