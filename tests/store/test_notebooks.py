"""What notebooks and shells show of what `Store` returns: tables without a name's markup, one line each, plots and data frames."""

import math
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.common.html_table import GLANCE_ROWS, MAX_ROWS, html_table
from tensorstore_ck.common.ids import SHOWN_ROOT_DIGITS
from tensorstore_ck.errors import BackendUnavailableError, MissingExtraError, NotFoundError

SCRIPT = "<script>alert(1)</script>"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags = set[str]()
        self.rows = 0
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self.rows += tag == "tr"

    def handle_data(self, data: str) -> None:
        self.text += data + "|"


def parsed(found: Any) -> Tags:
    html = found._repr_html_()
    parser = Tags()
    parser.feed(html)
    assert parser.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}, html
    return parser


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache") as opened:
        for step in range(1, 4):
            state = {SCRIPT: torch.full((2000,), float(step)), f"{SCRIPT}value": f"{SCRIPT}{step}"}
            opened.put_snapshot(state, ref=f"runs/{step % 2}", step=step, metrics={"loss": 1 / step, "<i>": step}, expect=tsck.ANY)
        opened.mark("runs/0", reason=SCRIPT)
        opened.set_policy("runs/*", keep_last=1)
        yield opened


def shown(store: tsck.Store) -> dict[str, Any]:
    return {
        "snapshot": store.resolve("runs/1"),
        "log": store.log(),
        "details": store.show("runs/1"),
        "diff": store.diff("runs/1~1", "runs/1"),
        "usage": store.usage(),
        "retention": store.apply_policies(dry_run=True),
        "fsck": store.fsck(),
        "gc": store.gc(dry_run=True),
    }


def test_tables_escape_names(store: tsck.Store) -> None:
    tables = {name: parsed(each) for name, each in shown(store).items()}
    for name in ("details", "diff"):
        assert SCRIPT in tables[name].text.replace("|", ""), name
    for name in ("snapshot", "log"):
        assert "<i>" in tables[name].text.replace("|", ""), name
    for name in ("snapshot", "log", "usage", "retention"):
        assert "runs/1" in tables[name].text, name
    assert {name: table.rows - 1 for name, table in tables.items() if name in ("log", "details", "usage", "retention")} == {
        "log": 3,
        "details": 1,
        "usage": 2,
        "retention": 3,
    }
    assert tables["diff"].rows == 1 + 2


def unreachable() -> None:
    raise BackendUnavailableError("no answer", object_id="log")


def test_a_store_its_names_and_an_open_snapshot_show_themselves(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(GLANCE_ROWS + 5):
        store.branch(f"more/{number}", "runs/1")
    for each in (store, store.branches()):
        table = parsed(each)
        assert "... and 7 more" in table.text
        assert table.rows == 1 + GLANCE_ROWS + 1
    store.tag("best", "runs/1")
    assert "best|" in parsed(store.tags()).text
    assert store.tags() == {"best": store.resolve("runs/1")}
    with store.open_snapshot("runs/1") as lazy:
        assert f"{SCRIPT}|float32|[2000]|7.8 KiB|" in parsed(lazy).text
    monkeypatch.setattr(store, "branches", unreachable)
    assert "cannot be read now" in parsed(store).text


def test_findings_and_what_gc_frees_are_rows(store: tsck.Store, tmp_path: Path) -> None:
    store.forget("runs/1@1")
    table = parsed(store.gc(tsck.GcOptions(undo_window_seconds=0, min_age_seconds=0), dry_run=True))
    assert "runs/1, step 1" in table.text
    next(path for path in (tmp_path / "ck" / "packs").rglob("*") if path.is_file()).unlink()
    report = store.fsck()
    assert not report.ok
    assert "missing_object" in parsed(report).text
    assert "1 errors" in repr(report)


def test_each_prints_as_one_short_line(store: tsck.Store) -> None:
    root = store.resolve("runs/1").root
    everything = [
        *shown(store).values(),
        store.advise("runs/1", stall_seconds=1),
        store.recode(dry_run=True),
        store.migrate_tiers(dry_run=True),
    ]
    everything += [*store.forget("runs/1@1"), store.repair()]
    for each in everything:
        assert len(repr(each)) < 250, repr(each)
        assert "\n" not in repr(each)
        assert repr(each).startswith(f"{type(each).__name__}(")
        assert "=" not in repr(each), "a dataclass prints all of its fields"
    assert len(repr(store.statistics("runs/1", bins=1000))) < 300
    with store.open_snapshot("runs/1") as lazy:
        assert repr(lazy) == "LazySnapshot(1 tensors)"
    assert f"newest Snapshot({root[:SHOWN_ROOT_DIGITS]}, " in repr(store.log())
    assert repr(store.log()[:0]) == "SnapshotLog(no snapshots)"


def test_a_long_table_says_what_it_leaves_out() -> None:
    html = html_table("many", ["n"], ([n] for n in range(MAX_ROWS + 7)))
    assert html.count("<tr>") == 1 + MAX_ROWS + 1
    assert "... and 7 more" in html
    assert html_table("<", ["&"], [["\x1b"]]) == (
        "<table><caption>&lt;</caption><thead><tr><th>&amp;</th></tr></thead><tbody><tr><td>\\x1b</td></tr></tbody></table>"
    )


def test_a_log_is_a_list_and_a_data_frame(store: tsck.Store) -> None:
    log = store.log()
    assert isinstance(log, list)
    assert log == [*log]
    frame = log.to_pandas()
    assert list(frame["step"]) == [3, 2, 1]
    assert list(frame["metrics.loss"]) == [1 / 3, 0.5, 1]
    assert list(frame["root"]) == [each.root for each in log]
    assert [time.value for time in frame["time"]] == [each.time_ns for each in log]
    assert str(frame["time"].dtype) == "datetime64[ns, UTC]"
    assert list(frame["mark"]) == ["", "bad", ""]
    store.put_snapshot({}, ref="no-step")
    newest = store.log().to_pandas().iloc[0]
    assert newest.isna()["step"]
    assert math.isnan(newest["metrics.loss"])
    assert len(store.log("no-step", limit=1).to_pandas()) == 1


def test_pandas_and_matplotlib_are_extras(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="pandas"):
        store.log().to_pandas()
    with pytest.raises(MissingExtraError, match="matplotlib"):
        store.plot("loss")


def test_plot(store: tsck.Store) -> None:
    from matplotlib.figure import Figure

    store.remove_policy("runs/*")
    store.put_snapshot({}, ref="runs/1", step=5, metrics={"loss": 0.25})
    for address, value in (("runs/1@1", math.nan), ("runs/1@3", math.inf)):
        store.annotate(address, {"loss": value})
    axes = Figure().subplots()
    assert store.plot("loss", axes=axes) is axes
    curves = {str(line.get_label()): np.asarray(line.get_xydata()) for line in axes.get_lines()}
    np.testing.assert_equal(curves["runs/0"], [[2, 0.5]])
    np.testing.assert_equal(curves["runs/1"], [[1, math.nan], [3, math.nan], [5, 0.25]])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["runs/1", "NaN or infinite", "runs/0"]  # type: ignore[union-attr]
    lost = [line for line in axes.get_lines() if line.get_color() == "red"]
    assert [np.asarray(line.get_xdata())[0] for line in lost] == [1, 3]
    only = store.plot("loss", "runs/0", axes=Figure().subplots())
    assert [line.get_label() for line in only.get_lines()] == ["runs/0"]
    with pytest.raises(NotFoundError, match="no snapshot has a metric 'nope'; there are: <i>, loss"):
        store.plot("nope")


def test_plot_makes_a_figure_that_a_notebook_shows(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    from matplotlib import pyplot

    axes = store.plot("loss", "runs/1")
    assert axes.get_figure() is pyplot.gcf()
    pyplot.close("all")


def test_dir_of_a_store_lists_the_public_names_alone(store: tsck.Store) -> None:
    names = dir(store)
    assert not [name for name in names if name.startswith("_")]
    assert {"put_snapshot", "checkout", "log", "plot", "statistics", "url", "random_streams", "close"} <= set(names)
    assert not {"streams", "kept_by", "retain", "tier"} & set(names)
    for name in names:
        assert getattr(type(store), name).__doc__, name
