"""Text that is safe to show: without the secrets of URLs (``scheme://user:secret@host``, ``?sig=secret``) and storage options, on one line.

`backend.open_backend` refuses a store's URL with a secret, so that no stored URL has one. This module cleans all other text: URLs as the
user typed them, and errors of libraries that repeat their arguments.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, quote_plus, urlsplit

HIDDEN: Final = "***"
SECRET_NAME: Final = re.compile(
    r"^(?!signature_version$)(?:sig$|.*(?:key|secret|token|passw|passphrase|pwd|credential|signature|sas|connection_string|auth|cookie))",
    re.IGNORECASE | re.DOTALL,
)
"""Matches the names of storage options whose values are secret."""
_PLAIN_VALUE: Final = re.compile(
    r"anon|browser|cache|cloud|google_default|basic|true|false|none|(?:~|\.{0,2})/.*\.(?:json|pem|p12|pfx|pub)|.*/\.ssh/.*", re.IGNORECASE
)
"""Values of options with such names that are not secrets: modes, and paths of key files."""
_SHORTEST_SECRET: Final = 4
"""Characters; shorter texts are part of too many words."""
_SHORTEST_DISTINCT: Final = 8
"""Characters; a shorter secret is replaced only as a whole word."""
_LONGEST_CHAIN: Final = 16
_SCHEME: Final = r"(?P<scheme>[A-Za-z][A-Za-z0-9+._-]{0,40}(?:(?::|%3A)(?:/|%2F)++))"
_USER: Final = r"(?![0-9]*(?:/|$))(?:[^\s/@?#:%\[]|%(?!3A))*+(?::|%3A)(?![0-9]{{1,5}}(?:[/?#]|$)|\*\*\*@){any}*(?:@|%40)"
"""A name, a colon that begins no port, and all up to the last @: a password may contain a /. Other libraries hide passwords as we do."""
_LONE_USER: Final = r"(?<=http://)[^\s/@?#]+@|(?<=https://)[^\s/@?#]+@"
"""For web servers it may be a token; elsewhere it is a name, as in abfss://container@account."""
_QUERY: Final = r"(?P<name>[?&;#](?!storage_class=)[^\s=&;#?\"'<>`]+=){any}*"
_SIGNED: Final = re.compile(
    r"(?P<name>\b(?:(?:X-Amz|X-Goog)-(?:Signature|Security-Token|Credential)|AccountKey|SharedAccessSignature)=|[?&]sig=)[^\s&;\"'<>`]*",
    re.IGNORECASE,
)
_SEPARATORS: Final = re.compile(r":/|%3A|X-Amz|X-Goog|sig=|AccountKey=|SharedAccessSignature=", re.IGNORECASE)


def one_line(text: str) -> str:
    """`text` with control, bidi and line-separating characters escaped: names in a snapshot or a server's error may contain them."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _patterns(any_char: str, any_value: str, whole: str) -> tuple[re.Pattern[str], ...]:
    flags = re.IGNORECASE | re.DOTALL
    return (
        re.compile(_SCHEME + _USER.format(any=any_char), flags),
        re.compile(_LONE_USER, flags),
        re.compile(_QUERY.format(any=any_value), flags),
        re.compile(_SCHEME + whole, flags),
        re.compile(whole.replace("*", "+"), flags),
    )


_IN_TEXT: Final = _patterns(r"[^\s\"<>`]", r"[^\s&;#\"'<>`]", r"[^\s\"<>`]*")
_ALONE: Final = _patterns(r".", r"[^&;#]", r".*")


def redacted(text: str) -> str:
    """`text` without the secrets of the URLs in it. Text without a scheme, such as a path with an @ or a ?, is unchanged."""
    return _redacted(text, _IN_TEXT)


def display_url(url: str) -> str:
    """A URL or path without its secrets: all of `url` is taken as one, whatever characters it contains."""
    return _redacted(url, _ALONE)


def secret_values(options: Mapping[str, Any]) -> list[str]:
    """The texts in storage options whose names say that they are secret, the longest first."""
    secrets = {form for text in _secrets(options, is_secret=False) for form in _forms(text) if len(form) >= _SHORTEST_SECRET}
    return sorted(secrets, key=len, reverse=True)


def without(text: str, secrets: Iterable[str]) -> str:
    """`text` without these secrets, and without those of URLs."""
    for secret in secrets:
        if len(secret) < _SHORTEST_DISTINCT:
            text = re.sub(rf"(?:(?<!\w)|(?<=%[0-9A-Fa-f]{{2}})){re.escape(secret)}(?!\w)", HIDDEN, text)
        else:
            text = text.replace(secret, HIDDEN)
    return redacted(text)


def clean_error(error: BaseException, secrets: Sequence[str]) -> None:
    """Removes secrets and control characters from the messages of another library's error and of its causes."""
    current: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if current is None:
            return
        current.args = tuple(_clean(arg, secrets) for arg in current.args)
        if isinstance(current, OSError):
            for name in ("strerror", "filename", "filename2"):
                if isinstance(value := getattr(current, name), str):
                    setattr(current, name, _clean(value, secrets))
        if hasattr(current, "__notes__"):
            current.__notes__ = [_clean(note, secrets) for note in current.__notes__]
        cause = current.__cause__ or current.__context__
        if cause is not None and (text := _substitute_text(cause, secrets)):
            current.__cause__ = cause = RuntimeError(text)
        current = cause


def shown_cause(error: BaseException, secrets: Sequence[str]) -> BaseException:
    """`error`, after `clean_error`; or a substitute, if its text is built from attributes that still contain a secret."""
    text = _substitute_text(error, secrets)
    return RuntimeError(text) if text else error


def _substitute_text(error: BaseException, secrets: Sequence[str]) -> str:
    error.args = tuple(_clean(arg, secrets) for arg in error.args)
    text = str(error)
    return f"{type(error).__name__}: {_clean(text, secrets)}" if without(text, secrets) != text else ""


def _clean(value: Any, secrets: Sequence[str]) -> Any:
    return one_line(without(value, secrets)) if isinstance(value, str) else value


def hidden_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Storage options without their secrets."""
    return {name: _hidden(name, value) for name, value in options.items()}


def _redacted(text: str, patterns: tuple[re.Pattern[str], ...]) -> str:
    if not _SEPARATORS.search(text):
        return text
    user, lone_user, query, whole, run = patterns

    def without_user(match: re.Match[str]) -> str:
        """Limits each match to the last @: otherwise the search would run to the end of the text from every scheme in it."""
        end = max(match[0].rfind("@") + 1, match[0].rfind("%40") + 3)
        return user.sub(rf"\g<scheme>{HIDDEN}@", match[0][:end]) + match[0][end:]

    text = run.sub(without_user, text)
    text = lone_user.sub(f"{HIDDEN}@", text)
    text = whole.sub(lambda url: query.sub(rf"\g<name>{HIDDEN}", url[0]), text)
    return _SIGNED.sub(rf"\g<name>{HIDDEN}", text)


def _secrets(value: object, *, is_secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secrets(item, is_secret=is_secret or bool(SECRET_NAME.search(str(name))))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _secrets(item, is_secret=is_secret)
    elif isinstance(value, bytes):
        yield from _secrets(value.decode("latin-1"), is_secret=is_secret)
    elif isinstance(value, str) and is_secret and not _PLAIN_VALUE.fullmatch(value):
        yield value
        yield from _parts(value)
    elif isinstance(value, str) and "@" in value:
        with suppress(ValueError):
            yield urlsplit(value).password or ""


def _parts(text: str) -> Iterator[str]:
    """The secrets in a connection string, a query, a header, or a JSON document."""
    yield text.removeprefix("?")
    yield text.rpartition(" ")[2]  # Bearer ...
    fields = (field.partition("=") for field in re.split("[?&;]", text))
    yield from _secrets({name: value for name, _, value in fields}, is_secret=False)
    with suppress(ValueError, RecursionError):
        yield from _secrets(json.loads(text), is_secret=False)


def _forms(text: str) -> set[str]:
    """The text as other libraries may print it: in a URL, in a string literal."""
    return {text, quote(text), quote(text, safe=""), quote_plus(text), repr(text)[1:-1], json.dumps(text)[1:-1]}


def _hidden(name: str, value: Any) -> Any:
    if SECRET_NAME.search(name) and not (isinstance(value, str) and _PLAIN_VALUE.fullmatch(value)):
        return name.upper()
    if isinstance(value, Mapping):
        return {str(key): _hidden(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden("", item) for item in value]
    return display_url(value) if isinstance(value, str) else value
