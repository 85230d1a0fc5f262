"""What a gigabyte costs a month at each location, as users give it: ``s3=0.023``, ``/data=0.1``, or a file of such lines."""

import math
import os
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Self

from tensorstore_ck.errors import InvalidOptionError, NotFoundError

GB: Final = 10**9
MAX_FILE_BYTES: Final = 1 << 20


class Prices(NamedTuple):
    """USD a gigabyte (10**9 bytes) and month, by the beginning of a URL, or by its scheme; ``file`` is that of a folder."""

    by_name: Mapping[str, float]

    @classmethod
    def parse(cls, words: Iterable[str]) -> Self:
        """From ``NAME=USD`` (several joined by ``,``), or names of files with a line for each.

        Raises:
            InvalidOptionError: it is neither.
            NotFoundError: there is no such file.
        """
        prices: dict[str, float] = {}
        for word in words:
            lines = word.split(",") if "=" in word else _lines(word)
            for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
                name, _, price = line.rpartition("=")
                try:
                    usd = float(price)
                except ValueError:
                    usd = math.nan
                if not name.strip() or not 0 <= usd < math.inf:
                    raise InvalidOptionError(
                        f"a price is NAME=USD a gigabyte and month, such as s3=0.023 or /data=0.1, not {line!r}", object_id="price"
                    )
                prices[name.strip()] = usd
        return cls(prices)

    def of(self, url: str) -> float | None:
        """The price of a location: of several names that fit, the longest counts."""
        scheme = url.partition("://")[0] if "://" in url else "file"
        names = [name for name in self.by_name if name in (scheme, url) or url.startswith(name.rstrip("/") + "/")]
        return self.by_name[max(names, key=len)] if names else None

    def usd_per_month(self, sizes: Mapping[str, int]) -> float | None:
        """What bytes by location cost together; None if one of the locations has no price."""
        prices = {url: self.of(url) for url, size in sizes.items() if size}
        known = {url: price for url, price in prices.items() if price is not None}
        return sum(sizes[url] / GB * price for url, price in known.items()) if len(known) == len(prices) else None


NO_PRICES: Final = Prices({})


def usd_text(usd: float) -> str:
    """``12.50 USD``; of less than a cent, ``< 0.01 USD``."""
    return "< 0.01 USD" if 0 < usd < 0.005 else f"{usd:,.2f} USD"


def _lines(path: str) -> list[str]:
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            return file.read(MAX_FILE_BYTES).splitlines()
    except FileNotFoundError as exc:
        raise NotFoundError(f"there is no file of prices {path!r}; a price itself is NAME=USD, such as s3=0.023", object_id=path) from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidOptionError(f"the file of prices {path} cannot be read: {exc}", object_id=path) from exc
