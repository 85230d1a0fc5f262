"""States of torch: taken apart for the store, put together again."""

from tensorstore_ck.state.capture import capture

__all__ = ["capture"]
