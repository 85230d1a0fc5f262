"""The views: plain SQL for dashboards, with the stores' URLs, and times as dates.

In PostgreSQL a time is a ``timestamptz``; in SQLite, which has no such type, a text such as ``2026-01-31T12:00:00Z``.
"""

import re
from collections.abc import Mapping
from typing import Final

_TIME: Final = {
    "sqlite": "strftime('%Y-%m-%dT%H:%M:%SZ', {0} / 1000000000, 'unixepoch')",
    "postgresql": "to_timestamp({0} / 1000000000.0)",
}
_JOINED: Final = {"sqlite": "group_concat({0}, ', ')", "postgresql": "string_agg({0}, ', ' ORDER BY {0})"}

VIEWS: Final[Mapping[str, str]] = {
    "snapshot_overview": """
        SELECT st.url AS store, s.ref, s.job, s.step, <time s.time_ns> AS time, s.state, s.logical_bytes, s.new_bytes, s.mark, s.reason,
            (SELECT <joined t.name> FROM tags t WHERE t.store_id = s.store_id AND t.ulid = s.ulid) AS tags,
            (SELECT count(*) FROM pins p WHERE p.store_id = s.store_id AND p.ulid = s.ulid) AS pins,
            s.root, s.ulid, s.actor, s.time_ns
        FROM snapshots s JOIN stores st ON st.store_id = s.store_id""",
    "job_overview": """
        SELECT st.url AS store, j.ref, j.job, j.puts, j.processes, j.first_step, j.last_step, <time j.first_time_ns> AS first_time,
            <time j.last_time_ns> AS last_time, j.logical_bytes, j.new_bytes,
            (SELECT count(*) FROM snapshots s WHERE s.store_id = j.store_id AND s.ref = j.ref AND s.state = 'live') AS live
        FROM jobs j JOIN stores st ON st.store_id = j.store_id""",
    "metric_history": """
        SELECT st.url AS store, s.ref, s.job, s.step, <time s.time_ns> AS time, m.name AS metric, m.value, s.state, s.root, s.time_ns
        FROM metrics m JOIN snapshots s ON s.id = m.snapshot JOIN stores st ON st.store_id = s.store_id""",
    "pinned": """
        SELECT st.url AS store, s.ref, s.job, s.step, p.owner, p.reason, <time p.time_ns> AS since, <time p.expires_ns> AS expires,
            s.logical_bytes, s.root
        FROM pins p JOIN stores st ON st.store_id = p.store_id JOIN snapshots s ON s.store_id = p.store_id AND s.ulid = p.ulid""",
    "storage_by_job": """
        SELECT st.url AS store, s.ref, s.job, s.state, count(*) AS snapshots, sum(s.new_bytes * 1.0) AS new_bytes
        FROM snapshots s JOIN stores st ON st.store_id = s.store_id GROUP BY st.url, s.ref, s.job, s.state""",
    "gc_history": """
        SELECT st.url AS store, g.n, <time g.time_ns> AS time, g.actor, g.condemned_packs, g.swept_packs, g.swept_parts,
            g.swept_snapshots, g.rescued_packs, g.relocated_packs, g.purged_windows, g.settled_n, g.time_ns
        FROM gc_runs g JOIN stores st ON st.store_id = g.store_id""",
    "report_history": """
        SELECT st.url AS store, r.n, <time r.time_ns> AS time, r.actor, r.run, r.outcome, r.duration_ns / 1000000000.0 AS duration_seconds,
            r.counts, r.message, r.time_ns
        FROM reports r JOIN stores st ON st.store_id = r.store_id""",
    "event_history": """
        SELECT st.url AS store, e.n, e.position, <time e.time_ns> AS time, e.actor, e.op, e.ref, e.root, e.detail, e.time_ns
        FROM events e JOIN stores st ON st.store_id = e.store_id""",
}


def create_view(name: str, dialect: str) -> str:
    """The statement that creates a view."""
    forms = {"time": _TIME[dialect], "joined": _JOINED[dialect]}
    body = re.sub(r"<(\w+) ([\w.]+)>", lambda match: forms[match[1]].format(match[2]), VIEWS[name])
    return f"CREATE VIEW {name} AS {body}"
