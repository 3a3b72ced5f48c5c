"""Text that came from elsewhere, made fit for a log or a terminal."""


def printable(text: str, most: int | None = 1000) -> str:
    """The text on one line: what cannot be printed (line breaks, escapes) as question marks, and at most so long.

    Args:
        most: characters; None for all.
    """
    return "".join(c if c.isprintable() else "?" for c in text)[:most]
