"""Everything that FORMAT.md describes: bytes in and bytes out. No I/O and no torch."""
