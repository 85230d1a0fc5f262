"""``python -m tensorstore_ck.cli``: the same as ``tsck``."""

from tensorstore_ck.cli import main

main()
