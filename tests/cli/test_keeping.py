"""pin, unpin, forget, undo and gc, as a user runs them."""

import pytest

from tests.cli.conftest import Tsck

NOW = ("--undo-window", "0s", "--min-age", "0s", "--max-delete", "100%")


def test_pins(history: Tsck) -> None:
    assert "no pins" in history("pin").out
    assert history("pin", "runs/gpt~1", "--reason", "mmlu", "--owner", "ada", "--expires", "7d").code == 0
    line = history("pin").out.splitlines()[1]
    assert "ada" in line
    assert "mmlu" in line
    assert history("unpin", "runs/gpt~1").code == 25
    assert history("unpin", "runs/gpt~1", "--owner", "ada").code == 0
    assert "no pins" in history("pin").out


def test_forget_undo_and_gc(history: Tsck) -> None:
    root = history("log", "runs/gpt", "--json").json[1]["root"]
    history("tag", "v1", "runs/gpt~1")
    assert "STILL HELD BY" in history("forget", root).out
    assert len(history("log", "runs/gpt", "--json").json) == 1
    assert "brought back of branch runs/gpt" in history("undo").out
    assert len(history("log", "runs/gpt", "--json").json) == 2
    history("forget", root[:12], "v1")
    assert "freed: 0 B" in history("gc").out
    assert "of branch runs/gpt: 1 snapshot" in history("forget").out

    before = history("usage", "--json").json["objects_bytes"]
    planned = history("gc", "--dry-run", *NOW, "--json").json
    assert planned["report"]["dry_run"]
    assert [gone["root"] for gone in planned["report"]["snapshots"]] == [root]
    assert history("usage", "--json").json["objects_bytes"] == before
    done = history("gc", *NOW, "--json").json
    assert done["freed_bytes"] == planned["freed_bytes"] > 0
    assert history("undo").code == 25
    assert history("fsck", "--read-data").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("forget", "runs/gpt~0"), 11, "is where branch"),
        (("forget", "nope"), 25, "no ref or snapshot"),
        (("undo", "nope"), 25, "cannot be undone"),
        (("pin", "runs/gpt", "--expires", "soon"), 2, "no length of time"),
        (("gc", "--max-delete", "120%"), 2, "not between"),
        (("gc", "--grace", "-1s"), 2, "no length of time"),
    ],
)
def test_what_cannot_be_done(history: Tsck, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = history(*arguments)
    assert (result.code, message in result.err) == (code, True), result


def test_gc_refuses_to_free_too_much(history: Tsck) -> None:
    history("forget", "runs/gpt")
    refused = history("gc", "--undo-window", "0s", "--min-age", "0s", "--max-delete", "10%")
    assert refused.code == 37
    assert "--max-delete 100%" in refused.err
    assert "nothing was forgotten" not in history("forget").out, "what it would have ended is still there"
    dry = ("gc", "--dry-run", "--undo-window", "0s", "--min-age", "0s", "--max-delete")
    planned = history(*dry, "10%")
    assert planned.code == 0
    assert "would be refused: " in planned.out
    assert "--max-delete 100%" in history(*dry, "10%", "--json").json["report"]["refused"]
    assert history(*dry, "100%", "--json").json["report"]["refused"] is None
    assert "refused" not in history(*dry, "100%").out
