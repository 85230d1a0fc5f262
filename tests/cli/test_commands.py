"""Each command does what it says, for people and as JSON."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import save_file

import tensorstore_ck as tsck_package
from tensorstore_ck.common.units import human_bytes
from tests.cli.conftest import Tsck
from tests.cli.everycommand import commands


def test_init_makes_a_store_once(tsck: Tsck) -> None:
    made = tsck("init", "new", "--json", store=None)
    assert made.code == 0
    assert made.json["config"]["format"] == 1
    again = tsck("init", "new", store=None)
    assert again.code == 28
    assert "already" in again.err
    assert tsck("init", store="here").code == 0
    assert Path("here/store.json").exists()


def test_the_current_folder_is_the_default_store(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    assert history("log", store=None).code == 30
    assert len(history("log", "--json", "-s", "ck", store="elsewhere").json) == 2
    monkeypatch.chdir("ck")
    assert len(history("log", "--json", store=None).json) == 2


def test_log_lists_newest_first_in_aligned_columns(history: Tsck) -> None:
    lines = history("log", "runs/gpt").out.splitlines()
    assert lines[0].split() == ["ROOT", "STEP", "TIME", "(UTC)", "SIZE", "NEW", "STATE", "METRICS"]
    assert [line.split()[1] for line in lines[1:]] == ["2", "1"]
    assert len({line.index("val_loss") for line in lines[1:]}) == 1
    assert len(lines[1].split()[0]) == 12
    assert "T" in lines[1].split()[2]
    assert lines[1].split()[2].endswith("Z")


def test_log_limits_and_covers_all_branches(history: Tsck) -> None:
    assert history("branch", "exp/x", "runs/gpt@1").code == 0
    assert [row["step"] for row in history("log", "-n", "1", "--json").json] == [2]
    assert history("log").out.startswith("REF")
    assert [row["step"] for row in history("log", "exp/x", "--json").json] == [1]


def test_put_continues_from_the_branch(history: Tsck) -> None:
    newest, first = history("log", "runs/gpt", "--json").json
    assert newest["parent"] == first["root"]
    assert first["parent"] is None
    assert first["metrics"] == {"val_loss": 2.5}
    assert newest["new_bytes"] < 10_000 < newest["logical_bytes"]


def test_put_refuses_when_the_branch_moves_meanwhile(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorstore_ck.cli import model_files

    load = model_files.load_file

    def load_slowly(path: str) -> model_files.LoadedFile:
        with tsck_package.open("ck", cache_dir="other") as store:
            store.put_snapshot({"a": 1}, ref="runs/gpt", expect=tsck_package.ANY)
        return load(path)

    with monkeypatch.context() as patch:
        patch.setattr(model_files, "load_file", load_slowly)
        assert history("put", "model.safetensors", "--ref", "runs/gpt").code == 11
    assert history("log", "runs/gpt", "--json").json[0]["step"] is None


def test_show_prints_metadata_values_and_tensors(history: Tsck) -> None:
    shown = history("show", "runs/gpt@1")
    assert "lr" in shown.out
    assert "author" in shown.out
    assert any(line.split()[:3] == ["model.a", "float32", "100x100"] for line in shown.out.splitlines())
    document = history("show", "runs/gpt@1", "--json").json
    assert document["metadata"] == {"author": "me", "format": "pt", "lr": 3e-4}
    assert ["model.b", "bfloat16", [3], 6] in document["tensors"]


def test_show_cuts_long_lists_unless_asked(tsck: Tsck) -> None:
    with tsck_package.open("ck", create=True, cache_dir="cache") as store:
        store.put_snapshot({f"value{number:03}": number for number in range(100)}, ref="many")
    assert "and 60 more (--all shows them)" in tsck("show", "many").out
    assert "value099" not in tsck("show", "many").out
    assert "value099" in tsck("show", "many", "--all").out


def test_diff_names_what_changed(history: Tsck) -> None:
    document = history("diff", "runs/gpt~1", "runs/gpt", "--json").json
    assert [change["name"] for change in document["tensors"]] == ["model.b"]
    text = history("diff", "runs/gpt~1", "runs/gpt").out
    assert "model.b" in text
    assert "model.a" not in text
    assert "the same tensors and values" in history("diff", "runs/gpt", "runs/gpt").out


def test_branch_reset_tag_untag(history: Tsck) -> None:
    assert history("branch", "exp/x", "runs/gpt@1").out.startswith("branch exp/x is at ")
    assert set(history("branch", "--json").json) == {"exp/x", "runs/gpt"}
    assert [line.split()[0] for line in history("branch").out.splitlines()] == ["BRANCH", "exp/x", "runs/gpt"]
    assert history("reset", "exp/x", "runs/gpt@2").code == 0
    assert history("branch", "--json").json["exp/x"]["step"] == 2
    assert "no tags yet" in history("tag").out
    assert history("tag", "v1", "runs/gpt~1").code == 0
    assert history("tag", "--json").json["v1"]["step"] == 1
    assert history("untag", "v1").code == 0
    assert history("tag", "--json").json == {}


def test_annotate_and_mark(history: Tsck) -> None:
    assert history("annotate", "runs/gpt@1", "mmlu=0.5", "f1=nan").code == 0
    assert history("log", "--json").json[1]["metrics"] == {"f1": "nan", "mmlu": 0.5, "val_loss": 2.5}
    assert history("mark", "runs/gpt", "--reason", "loss spike").code == 0
    assert "bad: loss spike" in history("log", "runs/gpt").out
    refused = history("get", "runs/gpt", "out.safetensors")
    assert refused.code == 36
    assert "--allow-marked" in refused.err
    assert history("get", "runs/gpt", "out.safetensors", "--allow-marked").code == 0
    assert history("mark", "runs/gpt", "--clear").code == 0
    assert "MARK" not in history("log", "runs/gpt").out


def test_usage_sums_per_ref(history: Tsck) -> None:
    history("tag", "v1", "runs/gpt~1")
    document = history("usage", "--json").json
    assert [(row["ref"], row["snapshots"]) for row in document["refs"]] == [("runs/gpt", 2), ("v1", 1)]
    lines = history("usage").out.splitlines()
    assert lines[0] == f"{human_bytes(document['objects_bytes'])} stored; gc would free 0 B now"
    assert lines[2].split() == ["REF", "SNAPSHOTS", "LOGICAL", "UNIQUE", "STORED", "SHARED", "EXCLUSIVE"]
    assert lines[5].startswith("all refs")
    by_snapshot = history("usage", "--snapshots", "--json").json["by_snapshot"]
    assert [(row["step"], row["held_by"]) for row in by_snapshot] == [(1, ["runs/gpt", "v1"]), (2, ["runs/gpt"])]
    assert history("usage", "--jobs").out.splitlines()[3].split()[0] == "runs"
    assert "100%" in history("usage", "--packs").out


def test_codecs_are_chosen_shown_and_changed(tsck: Tsck, tmp_path: Path) -> None:
    save_file({"w": torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 0.02}, tmp_path / "w.safetensors")
    tsck("init", "ck")
    assert tsck("put", "w.safetensors", "--ref", "raw", "--codec", "raw").code == 0
    first = tsck("usage", "--codecs", "--json").json["codecs"][0]
    assert first["codec"] == "raw"
    assert 400_000 <= first["raw_bytes"] < 401_000
    planned = tsck("recode", "raw", "--dry-run")
    assert "1 pack would be rewritten" in planned.out
    assert "blocks took 390" in planned.out
    assert "0 packs would not become smaller" in planned.out
    assert tsck("recode", "raw", "--older-than", "1d", "--json").json["rewritten"] == []
    assert "`tsck gc` frees what was replaced" in tsck("recode", "--all").out
    line = next(line for line in tsck("usage", "--codecs").out.splitlines() if line.startswith("planes"))
    assert line.split()[-1] in ("83%", "84%")
    assert tsck("import", "w.safetensors", "--ref", "fast", "--codec", "fast").code == 0


def test_fsck_says_what_it_checked(history: Tsck) -> None:
    result = history("fsck")
    assert result.code == 0
    assert "2 snapshots" in result.out
    assert "no errors" in result.out
    report = history("fsck", "--read-data", "--json").json
    assert report["ok"]
    assert report["report"]["data_bytes"] > 40_000


def test_quotas_are_set_shown_met_and_removed(history: Tsck, tmp_path: Path) -> None:
    assert "no quotas" in history("quota").out
    made = history("quota", "set", "runs/*", "--warn", "20kB", "--refuse", "30kB", "--json").json
    assert (made["glob"], made["warn_bytes"], made["refuse_bytes"], made["state"]) == ("runs/*", 20_000, 30_000, "refuse")
    assert made["share"] == made["used_bytes"] / 30_000 > 1
    header, row = history("quota").out.splitlines()
    assert header.split() == ["GLOB", "USED", "WARN", "REFUSE", "SHARE", "STATE"]
    assert row.split()[0] == "runs/*"
    assert row.split()[-1] == "refuse"
    assert history("quota", "list", "--json").json == {"runs/*": made}
    refused = history("put", "model.safetensors", "--ref", "runs/gpt", "--step", "3")
    assert refused.code == 47
    assert "`tsck quota set 'runs/*' --refuse SIZE" in refused.err
    assert history("put", "model.safetensors", "--ref", "other").code == 0
    assert "removed" in history("quota", "remove", "runs/*").out
    assert history("put", "model.safetensors", "--ref", "runs/gpt", "--step", "3").code == 0


def test_usage_says_when_gc_and_fsck_ran_last(history: Tsck) -> None:
    assert "last gc" not in history("usage").out
    assert history("gc").code == 0
    assert history("fsck", "--no-record").code == 0
    assert set(history("usage", "--json").json["last_runs"]) == {"gc"}
    assert history("fsck", "--read-data").code == 0
    fsck, gc = history("usage").out.splitlines()[-2:]
    assert gc.startswith("last gc: 20")
    assert gc.endswith(": ok, freed 0 B")
    assert fsck.startswith("last fsck: 20")
    assert fsck.endswith("KiB of data read")
    assert "changes nothing" in history("fsck", "--no-record", "--repair").err


def test_a_run_that_the_log_does_not_have_says_so(history: Tsck, tmp_path: Path) -> None:
    (entry,) = (tmp_path / "ck/log").rglob("*1")
    entry.unlink()
    damaged = history("fsck")
    assert damaged.code == 40
    assert "note: this check is not noted in the log: log/" in damaged.out
    assert "damaged log" in history("fsck", "--json").json["report"]["not_recorded"]


def test_fsck_names_the_tensors_that_damage_hits(history: Tsck, tmp_path: Path) -> None:
    for pack in (tmp_path / "ck/packs").rglob("*"):
        if pack.is_file() and pack.stat().st_size > 40_000:
            data = bytearray(pack.read_bytes())
            data[20_000] ^= 1
            pack.chmod(0o600)
            pack.write_bytes(data)
    assert history("fsck").code == 0
    damaged = history("fsck", "--read-data")
    assert damaged.code == 40
    assert "runs/gpt@1" in damaged.out
    assert "model.a" in damaged.out
    assert "1 error" in damaged.out
    assert not history("fsck", "--read-data", "--json").json["ok"]
    assert history("get", "runs/gpt", "out.safetensors").code == 41
    assert not list(tmp_path.glob("*out*"))


def test_fsck_frees_stale_uploads_only_when_asked(history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorstore_ck.backend.local import LocalBackend
    from tensorstore_ck.backend.protocol import ObjectInfo

    freed: list[str] = []
    monkeypatch.setattr(LocalBackend, "list_uploads", lambda *_: iter([ObjectInfo("old", 1, 0)]))
    monkeypatch.setattr(LocalBackend, "abort_upload", lambda _, name: freed.append(name))
    assert history("fsck").code == 0
    assert freed == []
    assert history("fsck", "--abort-uploads", "--json").json["aborted_uploads"] == ["old"]
    assert freed == ["old"]


def test_salvage_makes_a_new_log(history: Tsck, tmp_path: Path) -> None:
    before = history("log", "--json").json
    assert "nothing to do" in history("salvage").out
    assert history("salvage", "--json").json["log"] == ""
    history("tag", "v1", "runs/gpt@1")
    for entry in sorted(path for path in (tmp_path / "ck/log").rglob("*") if path.is_file())[:2]:
        entry.unlink()
    assert history("log", "--cache-dir", "fresh").code == 43
    checked = history("fsck", "--cache-dir", "fresh")
    assert checked.code == 40
    assert "tsck salvage" in checked.out
    planned = history("salvage", "--dry-run")
    assert "would make a new log" in planned.out
    assert history("log", "--cache-dir", "fresh").code == 43
    done = history("salvage")
    assert done.code == 0
    assert "2 snapshots, 1 branch and 1 tag" in done.out
    after = history("log", "--json", "--cache-dir", "fresh").json
    assert [row["root"] for row in after] == [row["root"] for row in before]
    assert history("log", "--rollback", "error").code == 0  # who salvaged it has seen it


def test_probe_prints_guarantees_and_speeds_and_estimates_a_snapshot(
    history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["tensorstore_ck.backend.probe"], "SPEED_BYTES", 8 << 20)
    monkeypatch.setattr(sys.modules["tensorstore_ck.backend.save_duration"], "QUICK_BYTES", 8 << 20)
    monkeypatch.setattr(sys.modules["tensorstore_ck.backend.save_duration"], "SAMPLE_BYTES", 8 << 20)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    probed = history("probe", "ck")
    assert probed.code == 0
    assert "creates exclusively     yes" in probed.out
    text = history("probe", "ck", "--size", "20MB", "--ranks", "12").out
    assert "A snapshot of 19.1 MiB by 12 ranks, with no block in the store yet:" in text
    assert "s with all ranks on this host" in text
    assert "/s by 8 ranks on this host" in text
    assert "are free: it fits" in text
    document = history("probe", "ck", "--size", "20MB", "--json").json
    assert document["result"]["exclusive_create"]
    assert (document["forecast"]["size_bytes"], document["forecast"]["ranks"], document["forecast"]["fits"]) == (20_000_000, 1, True)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    full = history("probe", "ck", "--size", "900PB")
    assert full.code == 34
    assert "it does NOT fit" in full.out


@pytest.mark.parametrize("command", [("gc", "--dry-run"), ("fsck", "--read-data"), ("fsck", "--repair")])
def test_gc_and_fsck_keep_their_rate_limit(history: Tsck, command: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []

    class Meter:
        rate = math.inf

        def __init__(self, rate: float) -> None:
            rates.append(rate)

    monkeypatch.setattr(sys.modules["tensorstore_ck.backend.store_backend"], "RateLimit", Meter)
    assert history(*command).code == 0
    assert rates == []
    assert history(*command, "--rate-limit", "100MB/s").code == 0
    assert rates == [100_000_000, 100_000_000]


def test_help_is_a_sentence_and_an_example(tsck: Tsck) -> None:
    for name, command in commands().items():
        assert command.get_short_help_str().endswith((".", "?")), name
        shown = tsck(name, "--help")
        assert shown.code == 0
        assert f"  tsck {name}" in shown.out.partition("Example")[2], name
        assert "--json" in shown.out, name


def test_help_lists_commands_in_order(tsck: Tsck) -> None:
    shown = tsck("--help").out
    first, _, others = shown.partition("Commands to begin with:")[2].partition("All commands:")
    assert [line.split()[0] for line in first.splitlines() if line.strip()][:4] == ["init", "put", "get", "log"]
    assert set(commands()) <= set(re.findall(r"[\w-]+", others))
    assert len(shown.splitlines()) <= 50
    assert tsck().out == shown
    assert tsck("--version").out == f"tsck {tsck_package.__version__}\n"


def test_advise_prints_and_draws(history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = history("advise", "runs/gpt", "--stall", "2s", "--mtbf", "6h", "--bandwidth", "500MB").out
    assert "mtbf" in told
    assert "best" in told
    assert "ETTR = t / (" in told
    assert history("advise", "runs/gpt", "--stall", "2s", "--json").json["costs"]["stall"] == 2.0
    unknown = history("advise", "runs/gpt")
    assert (unknown.code, "give stall_seconds= (--stall)" in unknown.err) == (22, True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        missing = history("advise", "runs/gpt", "--stall", "2s", "--plot", "x.png")
    assert "pip install 'tensorstore_ck[plot]'" in missing.err
    assert history("advise", "runs/gpt", "--stall", "2s", "--plot", str(tmp_path / "advice.png")).code == 0
    assert (tmp_path / "advice.png").read_bytes().startswith(b"\x89PNG")


def test_log_prints_what_keeps_each_and_draws(history: Tsck, tmp_path: Path) -> None:
    assert "KEPT BY" not in history("log", "runs/gpt").out
    history("tag", "v1", "runs/gpt~1")
    assert history("log", "runs/gpt").out.splitlines()[-1].endswith("tag v1")
    history("policy", "set", "runs/*", "keep_last=1")
    lines = history("log", "runs/gpt").out.splitlines()
    assert lines[1].endswith("newest, keep_last")
    assert "tag v1" in lines[2]
    history("annotate", "runs/gpt", "acc=0.5")
    history("annotate", "runs/gpt~1", "acc=0.25")
    drawn = history("log", "runs/gpt", "--plot", "acc").out.splitlines()
    assert [line.split()[1:3] for line in drawn[1:]] == [["1", "0.25"], ["2", "0.5"]]
    assert len(drawn[2].split()[3]) > 10 * len(drawn[1].split()[3])
    assert history("log", "--plot", "acc", "--output", str(tmp_path / "acc.png")).code == 0
    assert (tmp_path / "acc.png").read_bytes().startswith(b"\x89PNG")
    assert "no snapshot has a metric 'lost'" in history("log", "runs/gpt", "--plot", "lost").err
    assert history("log", "runs/gpt", "--output", "x.png").code == 2


def test_a_plot_marks_what_is_no_number(history: Tsck, tmp_path: Path) -> None:
    history("annotate", "runs/gpt~1", "acc=0.25", "lost=inf")
    history("annotate", "runs/gpt", "acc=nan")
    drawn = history("log", "runs/gpt", "--plot", "acc").out.splitlines()
    assert [line.split()[1:] for line in drawn[1:]] == [["1", "0.25", "#"], ["2", "nan", "!"]]
    assert [line.split()[1:] for line in history("log", "runs/gpt", "--plot", "lost").out.splitlines()[1:]] == [["1", "inf", "!"]]
    assert [point["value"] for point in history("log", "runs/gpt", "--plot", "acc", "--json").json] == [0.25, "nan"]

    def drawn_in_red() -> int:
        assert history("log", "runs/gpt", "--plot", "acc", "--output", str(tmp_path / "acc.png")).code == 0
        pixels = imread(tmp_path / "acc.png")
        return int(((pixels[..., 0] > 0.9) & (pixels[..., 1] < 0.1) & (pixels[..., 2] < 0.1)).sum())

    assert drawn_in_red() > 100
    history("annotate", "runs/gpt", "acc=0.5")
    assert drawn_in_red() == 0
