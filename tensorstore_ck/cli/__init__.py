"""`tsck`: the store from a shell. Parses, calls `Store`, renders; every decision is made below it.

Only here is the environment read (``TSCK_STORE``, ``TSCK_CACHE_DIR``). What needs torch imports it inside the command,
so that everything else starts fast and runs without it. One document on stdout with ``--json``; progress and warnings on stderr.
"""

from tensorstore_ck.cli.app import main

__all__ = ["main"]
