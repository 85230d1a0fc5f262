"""Makes a new log from the remaining objects when log entries or store.json were destroyed; or gives a copy of a store an identity.

Offline: no other process may write meanwhile.

salvage.py           finds intact snapshots, and the place in history of those without a log entry
lost_relocations.py  relocations whose log entry is lost
new_log.py             the new log: operations that fold to the same as the old ones
signed_refs.py       which refs must be signed again
report.py            SalvageReport
"""

from tensorstore_ck.maintenance.salvage.report import Salvaged, SalvageReport
from tensorstore_ck.maintenance.salvage.salvage import adopt, salvage

__all__ = ["SalvageReport", "Salvaged", "adopt", "salvage"]
