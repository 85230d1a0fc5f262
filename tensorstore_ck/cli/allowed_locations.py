"""The user's file of allowed locations, the only configuration file: a URL or absolute path on each line, or ``# text``."""

import os
from collections.abc import Sequence

from tensorstore_ck.backend.cold.allowed_locations import can_allow, places_file
from tensorstore_ck.cli.output import printable, say
from tensorstore_ck.errors import InvalidOptionError


def read_places() -> tuple[str, ...]:
    """The locations that the user allows.

    Raises:
        InvalidOptionError: a line is no location.
    """
    path = places_file()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidOptionError(f"{path} is no text: write a URL or an absolute path on each line", object_id=str(path)) from exc
    except OSError:
        return ()  # it does not exist, or is another user's: it allows nothing
    lines = [line.strip() for line in text.splitlines()]
    locations = [line for line in lines if line and not line.startswith("#")]
    wrong = next((line for line in locations if not can_allow(line)), None)
    if wrong is not None:
        raise InvalidOptionError(
            f"{path}: a line is a URL such as s3://bucket/prefix or an absolute path, not {wrong!r}: correct it", object_id=str(path)
        )
    return tuple(locations)


def note_places(places: Sequence[str]) -> None:
    """Adds lines to the file and prints that; if it cannot be written, prints what commands need instead."""
    path = places_file()
    for place in places:
        where = place if os.path.isabs(place) else place.partition("?")[0]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                file.write(b"\n" * (file.read() not in (b"", b"\n")) + os.fsencode(f"{where}\n"))
        except OSError as exc:
            say(f"tsck: {path} cannot be written ({exc.strerror}): commands need --allow-place {printable(where)}", err=True)
        else:
            say(f"tsck: noted in {path} that {printable(where)} is allowed; others who read this store may need --allow-place", err=True)
