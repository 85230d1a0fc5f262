"""What Tab offers in a shell, from where, and how the script gets there."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tensorstore_ck
from tensorstore_ck.cli import complete_names, main
from tensorstore_ck.cli.options import StoreChoice
from tests.cli.conftest import Tsck
from tests.effort import PATIENCE_SECONDS

CUT = re.compile(r"(?s).*?([^\s\"'><=;|&(:@]*|@[^\s\"'><=;|&(:@]*)$")
"""What bash replaces of a line: what follows the last of its COMP_WORDBREAKS, and a ``@`` before that."""
ROOT = str(Path(tensorstore_ck.__file__).parents[1])
Tab = Callable[..., list[str]]


def environment(line: str, folder: Path) -> dict[str, str]:
    replaced = CUT.fullmatch(line)
    assert replaced is not None
    asked = {"_TSCK_COMPLETE": "bash_complete", "COMP_LINE": line, "COMP_POINT": str(len(line)), "TSCK_REPLACED": replaced[1]}
    return {**asked, "TSCK_STORE": str(folder / "ck"), "TSCK_CACHE_DIR": str(folder / "cache")}


@pytest.fixture
def tab(history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tab:
    """What bash is offered after a line, on a store with two steps on runs/gpt, and a tag."""
    assert history("tag", "v1", "runs/gpt@1").code == 0
    monkeypatch.setattr(complete_names, "DEADLINE_SECONDS", PATIENCE_SECONDS)

    def press(line: str, **more: str) -> list[str]:
        done = CliRunner().invoke(main, [], env={**environment(line, tmp_path), **more}, catch_exceptions=False)
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout.splitlines()

    return press


def test_commands_and_options(tab: Tab) -> None:
    assert tab("tsck lo") == ["plain,log"]
    assert tab("tsck log --pl") == ["plain,--plot"]
    assert tab("tsck mark runs/gpt b") == ["plain,bad"]
    assert tab("tsck put ") == ["file,"]
    assert len(tab("tsck ")) > 30


def test_branches_and_tags(tab: Tab) -> None:
    assert tab("tsck log ") == ["plain,runs/gpt", "plain,v1"]
    assert tab("tsck show r") == tab('tsck show "r') == ["plain,runs/gpt"]
    assert tab("tsck untag ") == ["plain,v1"]
    assert tab("tsck watch ") == tab("tsck put x --ref ") == tab("tsck bisect ") == ["plain,runs/gpt"]
    assert tab("tsck diff v1 runs/gpt@2 ") == []


def test_steps_newest_first_without_what_bash_has_cut_off(tab: Tab) -> None:
    assert tab("tsck show runs/gpt@") == ["plain,@2", "plain,@1"]
    assert tab("tsck diff v1 runs/gpt@1") == ["plain,@1"]
    assert tab('tsck show "runs/gpt@', TSCK_REPLACED="runs/gpt@") == ["plain,runs/gpt@2", "plain,runs/gpt@1"]
    assert tab("tsck bisect runs/gpt --good=runs/gpt@2") == ["plain,@2"]
    assert tab("tsck bisect runs/gpt --good=") == ["plain,runs/gpt", "plain,v1"]


def test_metrics(tab: Tab, history: Tsck) -> None:
    assert history("annotate", "runs/gpt", "val/acc=1", "$(reboot)=1", "a b=1").code == 0
    assert tab("tsck log --plot ") == tab("tsck log runs/gpt --plot v") == ["plain,val/acc", "plain,val_loss"]


def test_the_store_of_the_command_line(tab: Tab, history: Tsck) -> None:
    history("init", "other")
    history("put", "model.safetensors", "--ref", "elsewhere", store="other")
    assert tab("tsck -s other log ") == tab("tsck log -s other ") == tab("tsck --store=other --json show ") == ["plain,elsewhere"]
    assert tab("tsck -s o") == ["dir,o"]


def test_zsh_and_fish_are_also_told_what_it_is(tab: Tab) -> None:
    words = {"COMP_WORDS": "tsck log v", "COMP_CWORD": "2"}
    assert tab("", _TSCK_COMPLETE="zsh_complete", **words) == ["plain", "v1", "tag"]
    assert tab("", _TSCK_COMPLETE="fish_complete", COMP_WORDS="tsck log v", COMP_CWORD="v") == ["plain,v1\ttag"]


def test_nothing_is_said_when_anything_goes_wrong(tab: Tab, tmp_path: Path) -> None:
    assert tab("tsck log ", TSCK_STORE="nowhere") == []
    assert tab("tsck log ", _TSCK_COMPLETE="csh_complete") == []
    assert tab("tsck frobnicate ") == []
    (tmp_path / "ck/store.json").chmod(0o600)
    (tmp_path / "ck/store.json").write_bytes(b"damaged")
    assert tab("tsck log ") == []


def test_a_store_that_does_not_answer_is_not_waited_for(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreChoice, "open_engine", lambda self, **_: threading.Event().wait())
    monkeypatch.setattr(complete_names, "DEADLINE_SECONDS", 0.01)
    assert tab("tsck log ") == []


def test_a_remote_store_is_not_asked(tab: Tab, history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete_names, "is_remote", lambda url: True)
    assert tab("tsck log ") == [], "this host does not know it yet"
    assert history("branch", "later", "runs/gpt", store=str(tmp_path / "ck")).code == 0
    shutil.move(tmp_path / "ck", tmp_path / "away")
    assert tab("tsck log ") == ["plain,later", "plain,runs/gpt", "plain,v1"]
    assert tab("tsck log ", TSCK_CACHE_DIR=str(tmp_path / "empty")) == []


def test_what_is_noted_is_written_through_no_link_and_into_no_folder_of_others(tmp_path: Path) -> None:
    """The cache's folder may be one where others can write, who know the names."""
    url, cache, victim = "s3://bucket/ck", tmp_path / "cache", tmp_path / "victim"
    victim.write_text("precious")
    complete_names.note_store(url, {}, str(cache), "first")
    (noted,) = (cache / "known").iterdir()
    assert (noted.read_text(), noted.stat().st_mode & 0o777) == ("first", 0o600)
    noted.unlink()
    noted.with_name(f"{noted.name}.{os.getpid()}").symlink_to(victim)
    complete_names.note_store(url, {}, str(cache), "second")
    noted.symlink_to(victim)
    assert complete_names.find_key(url, {}, str(cache)) is None
    complete_names.note_store(url, {}, str(cache), "third")
    assert victim.read_text() == "precious"
    shutil.rmtree(cache / "known")
    cache.chmod(0o777)
    complete_names.note_store(url, {}, str(cache), "fourth")
    assert not (cache / "known").exists() or not list((cache / "known").iterdir())


def test_many_steps_are_cut(tsck: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete_names, "MAX_OFFERED", 3)
    with tensorstore_ck.open("ck", create=True) as store:
        for step in range(6):
            store.put_snapshot({"a": torch.ones(1) * step}, ref="r", step=step)
    done = CliRunner().invoke(main, [], env=environment("tsck log r@", tmp_path))
    assert done.stdout.splitlines() == ["plain,@5", "plain,@4", "plain,@3"]


def test_the_script_works_in_bash_and_loads_no_torch(tab: Tab, history: Tsck, tmp_path: Path) -> None:
    program = tmp_path / "bin/tsck"
    program.parent.mkdir()
    watched = "import sys\nsys.modules['torch'] = None\nfrom tensorstore_ck.cli import main\nmain()"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{watched}" "$@"\n')
    program.chmod(0o700)
    line = "tsck log runs/gpt@"
    code = f"{history('completion', 'bash').out}\nCOMP_LINE='{line}' COMP_POINT={len(line)}\n"
    code += '_tsck_completion tsck @ runs/gpt\nprintf "%s\\n" "${COMPREPLY[@]}"; complete -p tsck'
    values = {name: value for name, value in environment("", tmp_path).items() if name.startswith("TSCK")}
    env = {**os.environ, **values, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": ROOT}
    done = subprocess.run(["bash", "--norc", "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["@2", "@1", "complete -o nosort -F _tsck_completion tsck"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_understands_the_script(tsck: Tsck, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    text = tsck("completion", shell).out
    assert text == tsck("completion", shell, "--json").json["script"].rstrip("\n") + "\n"
    subprocess.run([shell, "-n", "/dev/stdin"], input=text, text=True, check=True, timeout=120)


PLACES = {
    "bash": ("data/bash-completion/completions/tsck", "else add `source"),
    "zsh": ("data/zsh/site-functions/_tsck", "add `fpath=("),
    "fish": ("config/fish/completions/tsck.fish", "new shells load it"),
}


@pytest.mark.parametrize("shell", PLACES)
def test_install_writes_one_file_and_says_which(tsck: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("BASH_COMPLETION_USER_DIR", raising=False)
    done = tsck("completion", shell, "--install")
    place, advice = PLACES[shell]
    assert done.code == 0
    assert done.out.splitlines()[0] == f"wrote {tmp_path / place}"
    assert advice in done.out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / place]
    assert (tmp_path / place).read_text() == tsck("completion", shell).out


def test_a_folder_that_cannot_be_written(tsck: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("a file")
    done = tsck("completion", "fish", "--install")
    assert done.code == 22
    assert "the script cannot be written" in done.err
