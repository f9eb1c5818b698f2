"""How jaxserve logs: one line per fact, to stderr, with units."""

import logging
import sys

CLEAR_LINE = "\r\x1b[K"


def setup_logging(level: int = logging.INFO, process: str = "") -> None:
    """Shows jaxserve's own log lines; other libraries only warn. At a terminal a line replaces a progress bar.

    process: a name for each line to bear, where several processes of a kind log.
    """
    handler = logging.StreamHandler()
    clear = CLEAR_LINE if sys.stderr.isatty() else ""
    who = f" ({process})" if process else ""
    handler.setFormatter(logging.Formatter(f"{clear}%(asctime)s %(levelname)s %(name)s{who}: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("jaxserve").setLevel(level)
