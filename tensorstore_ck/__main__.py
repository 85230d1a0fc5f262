"""``python -m tensorstore_ck`` is ``tsck``."""

from tensorstore_ck.cli import main

if __name__ == "__main__":
    main(prog_name="python -m tensorstore_ck")
