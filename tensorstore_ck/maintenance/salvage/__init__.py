"""Makes a new log of what is left, when log entries or store.json were destroyed. Offline: no other process may write meanwhile.

report.py    what it says
run.py       what is left: snapshots that are intact, and where those belong that no entry names
moved.py     relocations whose log entry is lost
newlog.py    the new log: operations that fold to what the old one did
"""

from tensorstore_ck.maintenance.salvage.report import Salvaged, SalvageReport
from tensorstore_ck.maintenance.salvage.salvage import salvage

__all__ = ["SalvageReport", "Salvaged", "salvage"]
