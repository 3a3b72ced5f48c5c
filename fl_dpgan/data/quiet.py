"""Keeps what image libraries say to themselves: their logs and warnings quote headers, which name patients."""

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_LIBRARIES = ("pydicom", "PIL")
_lock = threading.Lock()
_inside = 0
_restore = ExitStack()


@contextmanager
def quiet() -> Iterator[None]:
    """Drop warnings, and pydicom's and Pillow's logs, meanwhile.

    Both are switches of the whole process, so that the first of several threads to come in sets them and the last to
    leave puts them back.
    """
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            _restore.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for name in _LIBRARIES:
                logger = logging.getLogger(name)
                _restore.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _restore.close()
