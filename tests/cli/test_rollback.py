"""What commands say of a log that went back, and `tsck accept-log`."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Tsck

pytestmark = pytest.mark.filterwarnings("always::tensorstore_ck.LogChangedWarning")  # elsewhere in the tests it is an error


@pytest.fixture
def gone_back(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> Tsck:
    """A store whose newest entry was deleted after this user had seen it."""
    monkeypatch.setenv("TSCK_STATE_DIR", "state")
    assert history("log", "runs/gpt").err == ""
    max(path for path in Path("ck/log").rglob("*") if path.is_file()).unlink()
    return history


@pytest.mark.parametrize(
    "command", [("log",), ("branch",), ("show", "runs/gpt"), ("tag", "x", "runs/gpt"), ("usage",), ("gc", "--dry-run")]
)
def test_every_command_warns(gone_back: Tsck, command: tuple[str, ...]) -> None:
    done = gone_back(*command)
    assert done.code == 0, done
    assert done.err.startswith("tsck: warning: "), done
    assert "the log ends at 1" in done.err, done


def test_it_is_accepted_with_the_command_that_the_warning_prints(gone_back: Tsck) -> None:
    said = gone_back("log", "--state-dir", "state").err
    found = re.findall(r"`tsck ([^`]+)`", said)
    assert [shlex.split(command)[0] for command in found] == ["log", "accept-log"]
    assert all(command.endswith("--state-dir state") for command in found)
    for command in found:
        assert gone_back(*shlex.split(command), store=None).code == 0
    assert gone_back("log").err == ""
    assert gone_back("put", "model.safetensors", "--ref", "runs/gpt").err == ""
    assert gone_back("accept-log", "--json").json == {"accepted": False, "head": 2, "gone": None}


def test_as_an_error_it_ends_every_command_but_accept_log(gone_back: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gone_back("log", "--rollback", "error").code == 46
    monkeypatch.setenv("TSCK_ROLLBACK", "error")
    for command in (("log",), ("put", "model.safetensors", "--ref", "runs/gpt"), ("gc",)):
        done = gone_back(*command, "--json")
        assert done.code == 46, done
        assert done.json["error"]["kind"] == "log_changed"
    assert gone_back("accept-log", "--json").json == {"accepted": True, "head": 1, "gone": 2}
    assert gone_back("log").code == 0


def test_accept_log_says_when_it_cannot_be_noted(gone_back: Tsck) -> None:
    shutil.rmtree("state")
    Path("state").write_text("")
    done = gone_back("accept-log")
    assert done.code == 22, done
    assert "state" in done.err
