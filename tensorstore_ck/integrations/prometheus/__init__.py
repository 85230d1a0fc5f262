"""A Prometheus endpoint over several stores, which are read through a catalog: `tsck exporter`. It changes nothing in a store.

exporter.py        refreshes the stores in the background, each on its own thread
watched_store.py   one store: whether it can be read, its space, and what the catalog knows of it and its branches
collector.py       the metrics: names, help, labels; what the exporter knows -> metrics
endpoint.py        the HTTP server
"""

from tensorstore_ck.common.extras import extra

with extra("exporter", "the Prometheus exporter"):
    import prometheus_client as _prometheus_client
    import sqlalchemy as _sqlalchemy

from tensorstore_ck.catalog.private_catalog import private_catalog
from tensorstore_ck.integrations.prometheus.endpoint import Endpoint
from tensorstore_ck.integrations.prometheus.exporter import Exporter

__all__ = ["Endpoint", "Exporter", "private_catalog"]

del _prometheus_client, _sqlalchemy
