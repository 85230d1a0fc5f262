"""`torch.distributed.checkpoint` over a store: pass a `Writer` to ``dcp.save`` and a `Reader` to ``dcp.load``.

target.py     which store, ref, step and address are meant
skeleton.py   DCP's flat names as a layout
writer.py     what ``dcp.save`` and ``dcp.async_save`` call
reader.py     what ``dcp.load`` calls
shadow.py     a DCP checkpoint beside it, compared bit for bit

DCP plans, gathers and scatters; its coordinator publishes. What is stored is a snapshot like any other.
"""

from tensorstore_ck.integrations.dcp.reader import Reader
from tensorstore_ck.integrations.dcp.shadow import ShadowReport, ShadowWarning, ShadowWriter
from tensorstore_ck.integrations.dcp.writer import Writer

__all__ = ["Reader", "ShadowReport", "ShadowWarning", "ShadowWriter", "Writer"]
