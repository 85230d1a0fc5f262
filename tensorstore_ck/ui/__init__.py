"""Pages in a browser, for one user on this host: `tsck ui`. They show a catalog and its stores, and change what `--allow` names.

app.py                the application: which path has which page
pages.py              common parts of all pages: templates, links, numbers as text, error pages, outcomes of actions
actions.py            the changes that pages may make, if allowed
security.py           access control: host, token, cookie, methods; headers of every answer
sources.py            the stores and their catalog; threads that read new entries of their logs
background.py         long reads, each in its own thread
overview.py           the page of all stores and branches
compare_runs.py       the page of several branches: their metrics over each other
find.py               snapshots of all stores for which a condition holds
activity.py           the operations in the logs
ref.py                the page of a branch: charts, graph, saves
lineage.py            the saves of a branch: which lead to its head, and which it left behind
series.py             the data of its charts, as JSON
graph.py              its graph
space.py              the bytes of a store by holder, and its growth; forgotten snapshots that can come back
health.py             last runs, a check on request, marks, and where packs lie
snapshot.py           the page of one snapshot, with why it is kept, and code to copy that opens it
catalog_snapshots.py  a snapshot by its address, what the catalog knows of it, and addresses that complete what was typed
snapshot_content.py   the content of a snapshot: its tables, read once; its tensors as a tree of groups
snapshot_tensors.py   groups, tensors and values of a snapshot, piece by piece
tensor_statistics.py  statistics and histograms of tensors
compare_snapshots.py  the page of two snapshots
differences.py        what differs between two, and by how much tensors changed

Each page has a module, a template of the same name, and a function `page(pages, request)`, which `app.py` lists. It reads the catalog where
possible, since a catalog of 10,000 snapshots answers at once, and opens the store only for the rest. Pages work
without JavaScript; htmx replaces pieces of a page, and uPlot draws charts from data in the page or from JSON.
"""

from tensorstore_ck.common.extras import extra

with extra("ui", "a server of pages in a browser"):
    import jinja2 as _jinja2
    import sqlalchemy as _sqlalchemy
    import starlette as _starlette
    import uvicorn as _uvicorn

from tensorstore_ck.catalog.private_catalog import private_catalog
from tensorstore_ck.ui.actions import parse_allow
from tensorstore_ck.ui.app import make_app, serve
from tensorstore_ck.ui.security import Access
from tensorstore_ck.ui.sources import Sources

__all__ = ["Access", "Sources", "make_app", "parse_allow", "private_catalog", "serve"]

del _jinja2, _sqlalchemy, _starlette, _uvicorn
