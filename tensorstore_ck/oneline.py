"""Text of others on one line, of which a terminal shows every character and obeys none."""


def one_line(text: str) -> str:
    """`text` without control, bidi and line-separating characters, such as names in a snapshot or a server's error could have."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
