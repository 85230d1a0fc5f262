"""The page of a snapshot: what the catalog knows, what is in it, statistics, and code that works."""

import math
import re
import shlex
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import torch
from click.testing import CliRunner
from sqlalchemy import update
from starlette.testclient import TestClient

import tensorstore_ck as tsck
from tensorstore_ck.catalog.schema import snapshots
from tensorstore_ck.cli import main
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.store import Store
from tensorstore_ck.ui import Sources, make_app
from tests.ui.conftest import ACCESS, BASE, Client, Open, enter

STATE: dict[str, Any] = {
    "model": {f"layers.{i}": {"weight": torch.full((16, 16), float(i)), "bias": torch.zeros(16)} for i in range(3)},
    "odd": {"<script>alert(1)</script>": torch.ones(2), "a[0]*": torch.ones(3)},
    "epoch": 3,
    "text": "long " * 100,
}


def url_of(store: Store, name: str = "snapshot", **query: object) -> str:
    return f"/stores/{store.engine.config.uuid}/{name}?{urlencode(query)}"


def read(browser: TestClient, url: str) -> str:
    """A page, as soon as what it reads in the background is there."""
    while "<progress" in (text := browser.get(url, headers={"hx-request": "true"}).text):
        pass
    return text


def words(text: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", text)))


def test_all_that_is_known_of_a_snapshot(browser: TestClient, store: Store) -> None:
    first = store.put_snapshot(STATE, ref="runs/gpt", step=1)
    metrics = {"loss": math.nan, "acc": 0.25}
    snapshot = store.put_snapshot({**STATE, "epoch": 4}, ref="runs/gpt", step=2, metrics=metrics, metadata={"commit": "0123abc"})
    last = store.put_snapshot(STATE, ref="runs/gpt", step=3)
    store.tag("kept", "runs/gpt@2")
    store.pin("runs/gpt@2", owner="ada", reason="paper")
    store.annotate("runs/gpt@2", {"mmlu": 0.5})
    store.mark("runs/gpt@2", reason="drifted <b>")
    text = read(browser, url_of(store, at=snapshot.root))
    shown = words(text)
    for each in (
        snapshot.root,
        snapshot.id,
        "runs/gpt step 2",
        "0123abc",
        "ada paper",
        "mmlu added later 0.5",
        "acc 0.25",
    ):
        assert each in shown
    assert "Marked bad : drifted <b>" in shown
    kept = url_of(store, "snapshot/kept", at=snapshot.id)
    assert f'hx-get="{kept}"' in text
    assert {"pinned by ada", "tag kept"} <= {each.strip() for each in re.findall(r"<li>([^<]*)</li>", read(browser, kept))}
    forgotten = store.put_snapshot(STATE, ref="runs/other", step=1)
    store.forget("runs/other")
    assert "An undo window holds it" in read(browser, url_of(store, "snapshot/kept", at=forgotten.id))
    assert "no policy removes it" in read(browser, url_of(store, "snapshot/kept", at=first.id))
    assert '<td class="number bad">NaN</td>' in text
    assert re.search(rf"Parent</dt><dd><a href=\"[^\"]*at={first.id}\"", text)
    assert re.search(rf"Children</dt><dd><a href=\"[^\"]*at={last.id}\"", text)
    assert f"compare?old={first.root}&amp;new={snapshot.root}" in text
    for address in (snapshot.id, snapshot.id.lower(), snapshot.root[:8], "runs/gpt@2", "runs/gpt~1", "kept", f" {snapshot.root} "):
        assert snapshot.root in browser.get(url_of(store, at=address)).text


def test_tensors_are_a_tree_of_groups(browser: TestClient, store: Store) -> None:
    store.put_snapshot(STATE, ref="runs/gpt")
    text = read(browser, url_of(store, at="runs/gpt"))
    assert "model.layers 6 tensors 3.2 KiB" in words(text)
    assert "<script>alert" not in text
    group = read(browser, url_of(store, "snapshot/tensors", at="runs/gpt", group="model.layers"))
    assert re.findall(r"<span class=\"mono name\">(.*?)</span>", group) == ["0", "1", "2"]
    assert "weight 16 \N{MULTIPLICATION SIGN} 16 float32 1.0 KiB 1.0 KiB in the tables Statistics" in words(
        read(browser, url_of(store, "snapshot/tensors", at="runs/gpt", group="model.layers.1"))
    )
    found = words(read(browser, url_of(store, "snapshot/tensors", at="runs/gpt", q="Layers.?.BIAS")))
    assert "3 tensors match" in found
    assert "model.layers.2.bias" in found
    assert "weight" not in found
    assert "0 tensors match" in read(browser, url_of(store, "snapshot/tensors", at="runs/gpt", q="nothing"))
    missing = browser.get(url_of(store, "snapshot/tensors", at="runs/gpt", group="nothing"))
    assert (missing.status_code, "no group" in missing.text) == (404, True)


def test_a_large_group_and_many_values_come_in_pages(browser: TestClient, store: Store) -> None:
    store.put_snapshot({"t": {f"n{i}": torch.zeros(1) for i in range(450)}, "v": {f"k{i}": i for i in range(450)}}, ref="big")
    shown, first = list[str](), 0
    for _ in range(3):
        page = read(browser, url_of(store, "snapshot/tensors", at="big", group="t", first=first))
        shown += re.findall(r"<th scope=\"row\" class=\"mono\" title=\"t\.(n\d+)\"", page)
        first += 200
    assert shown == [f"n{i}" for i in range(450)]
    assert "Show more" not in page
    values = read(browser, url_of(store, "snapshot/values", at="big", first=400))
    assert "401 \N{EN DASH} 450 of 450" in values
    assert "Next" not in values
    assert "v.k44 " in words(read(browser, url_of(store, "snapshot/values", at="big", q="k44")))


def test_long_values_are_shortened_and_all_of_them_is_a_click_away(browser: TestClient, store: Store) -> None:
    store.put_snapshot(STATE, ref="runs/gpt", metadata={"why": "w" * 300})
    text = read(browser, url_of(store, at="runs/gpt"))
    links = [unescape(link) for link in re.findall(r"href=\"([^\"]*)\">all \d+ characters", text)]
    assert [browser.get(link).text for link in links] == ["w" * 300, STATE["text"]]
    assert browser.get(links[0]).headers["content-type"].startswith("text/plain")
    assert STATE["text"] not in text


def test_statistics_of_a_tensor_and_of_a_group(browser: TestClient, store: Store) -> None:
    weight = torch.arange(256.0)
    weight[:3] = math.nan
    weight[3] = math.inf
    store.put_snapshot(
        {"a": {"w": weight, "x": torch.ones(4), "name": torch.zeros(2, dtype=torch.complex64)}, "b": torch.zeros(9)}, ref="r"
    )
    text = read(browser, url_of(store, "snapshot/statistics", at="r", tensor="a.w"))
    assert '<dt>NaN</dt><dd class="bad">3</dd>' in text
    assert '<dt>Infinite</dt><dd class="bad">1</dd>' in text
    assert "<dt>Maximum</dt><dd>255</dd>" in text
    assert sum(int(count) for count in re.findall(r"<title>(\d+) from", text)) == 252
    group = read(browser, url_of(store, "snapshot/statistics", at="r", group="a"))
    assert re.findall(r"<tr><th scope=\"row\" class=\"mono\">(.*?)</th>", group) == ["a.w", "a.x", "a.name"]
    assert "3 NaN and 1 infinite elements" in group
    everything = read(browser, url_of(store, "snapshot/statistics", at="r"))
    assert "4 tensors" in words(everything)
    assert "has no tensor" in read(browser, url_of(store, "snapshot/statistics", at="r", group="c"))


def test_damage_is_shown_in_its_place(browser: TestClient, store: Store) -> None:
    store.put_snapshot({"w": torch.randn(3000)}, ref="r")
    (pack,) = (file for file in (Path(store.url) / "packs").rglob("*") if file.is_file())
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    text = read(browser, url_of(store, "snapshot/statistics", at="r", tensor="w"))
    assert "They cannot be read" in text
    assert "does not match its hash" in text
    assert "Tensors 1, 11.7 KiB" in words(read(browser, url_of(store, at="r")))


@pytest.mark.parametrize("marked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_code_works_as_it_is_printed(
    sources: Callable[..., Sources], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, marked: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TSCK_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / 'it\'s a "store" $HOME `x`'
    with tsck.open(folder, create=True, no_sync=True) as store:
        store.put_snapshot(STATE, ref="runs/gpt", step=1)
        root = store.put_snapshot({**STATE, "epoch": 4}, ref="runs/gpt", step=2).root
        if marked:
            store.mark("runs/gpt")
        app = make_app(sources(store.url), ACCESS, open_options={"cache_dir": str(tmp_path / "cache2")})
        browser = enter(TestClient(app, base_url=BASE))
        page, _, _ = browser.get(url_of(store, at=root)).text.partition('id="actions"')
        tensor = read(browser, url_of(store, "snapshot/statistics", at=root, tensor="odd.a[0]*"))
    blocks = [
        (title, unescape(text)) for title, text in re.findall(r"<figcaption>([^<]*)</figcaption><pre[^>]*><code>(.*?)</code>", page, re.S)
    ]
    blocks += [
        (title, unescape(text)) for title, text in re.findall(r"<figcaption>([^<]*)</figcaption><pre[^>]*><code>(.*?)</code>", tensor, re.S)
    ]
    assert [title.partition(":")[0] for title, _ in blocks] == [
        "Python",
        "Command line",
        "Command line",
        "Command line",
        "fsspec",
        "Python",
    ]
    found: dict[str, Any] = {}
    for title, text in blocks:
        if title.startswith("Command line"):
            name, *arguments = shlex.split(text)
            done = CliRunner().invoke(main, arguments)
            assert (name, done.exit_code) == ("tsck", 0), done.output
        else:
            exec(text, found)
    assert torch.equal(found["state"]["model"]["layers.2"]["weight"], STATE["model"]["layers.2"]["weight"])
    assert found["tensor"].tolist() == [1, 1, 1]
    assert b"runs/gpt" in found["about"]
    assert (tmp_path / "state.pt").exists()
    assert (tmp_path / "cache2").exists()


def test_what_is_gone_or_forgotten_says_so(browser: TestClient, store: Store) -> None:
    gone = store.put_snapshot({"w": torch.ones(2000)}, ref="runs/gone", step=7, metrics={"loss": 1.5})
    store.forget("runs/gone")
    text = browser.get(url_of(store, at=gone.root)).text
    assert "was forgotten" in text
    (command,) = re.findall(r"<code>(tsck undo .*?)</code>", text)
    store.gc(GcOptions(undo_window_seconds=0, min_age_seconds=0, max_delete=1))
    text = browser.get(url_of(store, at=gone.root[:10])).text
    assert "This snapshot is gone" in text
    assert "runs/gone" in text
    assert "1.5" in text
    assert "Compare with" not in text
    assert browser.get(url_of(store, "snapshot/tensors", at=gone.id)).status_code == 200
    assert "nothing holds this snapshot" in read(browser, url_of(store, "snapshot/tensors", at=gone.id))
    assert command


def test_addresses_that_lead_nowhere(client: Client, store: Store, sources: Callable[..., Sources]) -> None:
    roots = [store.put_snapshot({"w": torch.ones(1) * i}, ref="runs/gpt", step=i).root for i in range(2)]
    its = sources()
    browser = enter(TestClient(make_app(its, ACCESS), base_url=BASE))
    for address, said in (
        ("nothing", "there is no ref or snapshot"),
        ("runs/gpt@9", "has no snapshot of step 9"),
        ("0" * 64, "no snapshot has a root"),
        ("a@b@c", "is not an address"),
        ("x" * 500, "write an address"),
        ("a\0", "write an address"),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAV", "there is no"),
    ):
        page = browser.get(url_of(store, at=address))
        assert page.status_code == 404
        assert said in unescape(page.text)
        assert 'name="at"' in page.text  # asks again
    assert 'name="at"' in browser.get(url_of(store)).text
    with its.catalog._database.writing() as connection:
        for root in roots:
            connection.execute(update(snapshots).where(snapshots.c.root == root).values(root="abcdabcd" + root[8:]))
    assert "give more digits" in browser.get(url_of(store, at="abcdabcd")).text
    assert "step 1" in words(browser.get(url_of(store, at="abcdabcd" + roots[1][8:])).text)


@pytest.mark.filterwarnings("ignore::tensorstore_ck.log.watermark.LogChangedWarning")
def test_a_store_that_died(client: Client, store: Store) -> None:
    root = store.put_snapshot(STATE, ref="runs/gpt", step=1, metrics={"loss": 2.5}).root
    store.put_snapshot({**STATE, "epoch": 4}, ref="runs/other")
    browser = enter(client())
    assert "model.layers" in read(browser, url_of(store, at="runs/other"))
    shutil.rmtree(store.url)
    for address in ("runs/gpt", root[:9]):
        text = browser.get(url_of(store, at=address)).text
        assert "cannot be read now" in text
        assert root in text
        assert "2.5" in text
    assert "What is in it cannot be read now" in read(browser, url_of(store, at=root))
    assert "model.layers" in read(browser, url_of(store, at="runs/other"))  # it was read before


def test_addresses_are_completed(browser: TestClient, store: Store) -> None:
    for step in (1, 10, 11, 2):
        root = store.put_snapshot({"w": torch.ones(step)}, ref="runs/gpt", step=step).root
    store.tag("kept_x", "runs/gpt@10")

    def offered(typed: str) -> list[str]:
        return re.findall(r"<option value=\"(.*?)\"", browser.get(url_of(store, "addresses", of="old", old=typed)).text)

    assert offered("") == ["runs/gpt", "kept_x"]
    assert offered("GPT".lower()) == ["runs/gpt"]
    assert offered("_") == ["kept_x"]
    assert offered("runs/gpt") == ["runs/gpt", "runs/gpt~1"]
    assert offered("runs/gpt@1") == ["runs/gpt@11", "runs/gpt@10", "runs/gpt@1"]
    assert offered(root[:6]) == [root]


@pytest.mark.slow
def test_the_tree_opens_in_a_browser(open_page: Open, store: Store) -> None:
    store.put_snapshot(
        {**STATE, "model": {"a": {"w": torch.randn(64), "v": torch.randn(64)}, "b": {"w": torch.full((4,), math.nan)}}}, ref="r"
    )
    page = open_page(url_of(store, at="r"))
    page.locator("summary", has_text="model").click()
    page.locator("summary", has_text="a").filter(has_text="2 tensors").last.click()
    page.get_by_role("link", name="Statistics of model.a.w").click()
    page.locator(".histogram rect").first.wait_for()
    page.get_by_text("Statistics of all 3 tensors").click()
    page.get_by_text("4 NaN and 0 infinite elements").wait_for()
    page.get_by_label("Names that contain").fill("odd.*")
    page.get_by_text("2 tensors match").wait_for()
    assert page.get_by_role("rowheader", name="odd.<script>alert(1)</script>").is_visible()
    assert page.locator("button[data-copy]").first.is_visible()
