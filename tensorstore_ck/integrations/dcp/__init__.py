"""`torch.distributed.checkpoint` over a store: pass a `Writer` to ``dcp.save`` and a `Reader` to ``dcp.load``.

target.py            the store, ref, step and address from arguments and DCP's checkpoint id
flat_layout.py       DCP's flat names as a layout
plans.py             DCP's plans in terms of a store: which rank writes which part
byte_items.py        DCP's byte items as native values, and back
duplicate_items.py   finds ranks with different copies under one name
dcp_save.py          one rank's side of a save: writes its part; the coordinator's commits
writer.py            Writer: what ``dcp.save`` and ``dcp.async_save`` call
reader.py            Reader: what ``dcp.load`` calls
shadow.py            ShadowWriter: a DCP checkpoint and a snapshot of one state, compared bit for bit

DCP plans, gathers and scatters; its coordinator publishes. The result is a snapshot like any other.
"""

from tensorstore_ck.integrations.dcp.reader import Reader
from tensorstore_ck.integrations.dcp.shadow import ShadowReport, ShadowWarning, ShadowWriter
from tensorstore_ck.integrations.dcp.writer import Writer

__all__ = ["Reader", "ShadowReport", "ShadowWarning", "ShadowWriter", "Writer"]
