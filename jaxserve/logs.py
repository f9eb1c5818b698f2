"""How jaxserve logs: one line per fact, to stderr, with units."""

import logging


def setup_logging(level: int = logging.INFO) -> None:
    """Shows jaxserve's own log lines; other libraries only warn."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("jaxserve").setLevel(level)
