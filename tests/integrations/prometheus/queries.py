"""The queries of the dashboard and of the alerts in docs/operations, and what they name."""

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import yaml

from tests.documents import DOCS, text

DASHBOARD = DOCS / "operations" / "grafana" / "tsck.json"
RULES = DOCS / "operations" / "prometheus" / "tsck.rules.yml"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text(DASHBOARD))
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(text(RULES))["groups"] for rule in group["rules"]]


def panel_queries(rate_interval: str = "5m") -> dict[str, str]:
    """By panel and target, with all stores and branches chosen."""
    return {
        f"{panel['title']} {target['refId']}": _chosen(target["expr"], rate_interval)
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }


def variable_queries() -> dict[str, tuple[str, str]]:
    """Variable -> the selector and the label whose values it offers."""
    found = {}
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert match
            found[variable["name"]] = _chosen(match[1], ""), match[2]
    return found


def named(query: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels that a query names. Raises ValueError if it is not PromQL."""
    metrics, labels = set(), set()
    for node in _nodes(promql_parser.parse(query)):
        if isinstance(node, promql_parser.VectorSelector):
            metrics.add(str(node.name))
            labels |= {matcher.name for matcher in node.matchers.matchers}
        modifier = getattr(node, "modifier", None)
        labels |= set(getattr(getattr(modifier, "matching", None) or modifier, "labels", ()))
    return metrics, labels


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None:
            yield from _nodes(child)
    for child in getattr(node, "args", ()):
        yield from _nodes(child)


def _chosen(query: str, rate_interval: str) -> str:
    for name, value in (("$__rate_interval", rate_interval), ("$store", ".*"), ("$ref", ".*")):
        query = query.replace(name, value)
    return query
