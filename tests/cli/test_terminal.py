"""Nothing that users of a store write into it controls a terminal: no command prints a control, bidi or line-separating character."""

import re
import socket
import traceback
from pathlib import Path
from typing import Final

import pytest
import torch
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.backend.remote_errors import remote_errors
from tensorstore_ck.cli import main
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.errors import StoreError
from tensorstore_ck.log import Op
from tests.cli.conftest import Tsck
from tests.cli.everycommand import runs

HOSTILE: Final = "x\u202ea\u2066b\u2069\u200e\u200f\x1b[2J\x1b]0;t\x07\x1b[35m\x9b31m\x7f\x00\u2028\u2029\u0085\nforged\ty"
NAME: Final = HOSTILE.replace("\0", "")
OURS: Final = re.compile(r"\x1b\[(?:0|1|31|32)m")


@pytest.fixture
def hostile(history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store in which every text that a user chooses is hostile; those that must be names are as odd as a name may be."""
    monkeypatch.setattr(socket, "gethostname", lambda: HOSTILE)
    with tsck.open(tmp_path / "ck", cache_dir=tmp_path / "cache") as store:
        store.checkout("runs/gpt")
        for step in (3, 4):
            state = {HOSTILE: torch.arange(4) + step, "value": HOSTILE, "list": [HOSTILE, {HOSTILE: HOSTILE}]}
            store.put_snapshot(state, ref="runs/gpt", step=step, metadata={HOSTILE: HOSTILE}, metrics={HOSTILE: float(step)})
        store.mark("runs/gpt", "bad", reason=HOSTILE)
        store.pin("runs/gpt", owner=NAME, reason=HOSTILE)
    assert history("init", "other").code == 0
    return tmp_path


def test_no_error_or_warning_of_the_library_has_such_a_character(tmp_path: Path) -> None:
    """Python prints them to the terminal of a training script."""
    said: list[BaseException] = []
    with tsck.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache") as store:
        snapshot = store.put_snapshot({HOSTILE: torch.arange(4)}, ref="runs/gpt")
        for into in ({"other": 1}, {HOSTILE: torch.zeros(5)}):
            with pytest.raises(StoreError) as caught:
                store.checkout("runs/gpt", into=into)
            said.append(caught.value)
        store.engine.log.append(lambda view: [Op.mark(Digest(bytes.fromhex(snapshot.root)), "drift", HOSTILE)])
        with pytest.warns(UserWarning, match="is marked drift") as warned:
            store.checkout("runs/gpt")
    with pytest.raises(StoreError) as caught, remote_errors("read", "x", "s3://bucket", ()):
        raise ConnectionError(HOSTILE) from OSError(5, HOSTILE, HOSTILE)
    said.append(caught.value)
    texts = [str(warning.message) for warning in warned] + ["".join(traceback.format_exception(each)) for each in said]
    assert all("\\u202e" in text for text in texts)
    assert not [char for text in texts for char in text if char != "\n" and not char.isprintable()]
    assert "\nforged" not in "".join(texts)


@pytest.mark.slow
def test_no_command_prints_a_character_that_a_terminal_obeys(hostile: Path) -> None:
    seen = ""
    more = [
        ["find", NAME, "--db", "catalog.sqlite"],
        ["show", HOSTILE],
        [HOSTILE],
        ["log", "--json", HOSTILE],
        ["get", "runs/gpt", NAME],
    ]
    for arguments in [*runs(), *more]:
        env = {"TSCK_STORE": "ck", "TSCK_CACHE_DIR": str(hostile / "cache")}
        result = CliRunner().invoke(main, arguments, env=env, color=True)
        assert result.exception is None or isinstance(result.exception, SystemExit | OSError), arguments
        text = OURS.sub("", result.output)
        assert not [char for char in text if char != "\n" and not char.isprintable()], arguments
        assert "\nforged" not in text, arguments
        seen += text
    assert seen.count("\\u202e") > 20
