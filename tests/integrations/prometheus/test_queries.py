"""The dashboard and the alerts name metrics and labels that the exporter has."""

from itertools import pairwise

import pytest

from tensorstore_ck.integrations.prometheus.collector import KINDS
from tests.documents import DOCS, text
from tests.integrations.prometheus.queries import DASHBOARD, RULES, dashboard, named, panel_queries, rules, variable_queries

LABELS = {kind.name: {*kind.labels, "job", "instance"} for kind in KINDS}
QUERIES = {
    **panel_queries(),
    **{name: selector for name, (selector, _) in variable_queries().items()},
    **{rule["alert"]: rule["expr"] for rule in rules()},
}


@pytest.mark.parametrize("title", QUERIES)
def test_a_query_names_what_there_is(title: str) -> None:
    metrics, labels = named(QUERIES[title])
    assert metrics
    assert metrics <= set(LABELS)
    assert labels <= set.union(*(LABELS[metric] for metric in metrics))


def test_queries_that_name_something_else_are_found() -> None:
    assert named('sum by (a) (rate(x_total{b="c"}[5m])) > on (d) y or vector(0)') == ({"x_total", "y"}, {"a", "b", "d"})
    with pytest.raises(ValueError, match="unclosed"):
        named("sum(rate(x_total)")


def test_variables_offer_labels() -> None:
    for selector, label in variable_queries().values():
        (metric,), _ = named(selector)
        assert label in LABELS[metric]


def test_the_dashboard_can_be_drawn() -> None:
    board = dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
            assert all(first["refId"] < second["refId"] for first, second in pairwise(panel["targets"]))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert variables == {"datasource", "store", "ref"}


def test_the_page_links_to_both() -> None:
    page = text(DOCS / "guides" / "monitoring.md")
    for path in (DASHBOARD, RULES):
        assert f"(../{path.relative_to(DOCS).as_posix()})" in page
    for rule in rules():
        assert f"`{rule['alert']}`" in page
