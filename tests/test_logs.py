"""Log lines and progress bars share the terminal."""

import io
import logging

import pytest

from jaxserve.logs import CLEAR_LINE, setup_logging


class Screen(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_at_a_terminal_a_line_takes_the_place_of_a_progress_bar(terminal: bool, monkeypatch: pytest.MonkeyPatch):
    screen = Screen(terminal)
    root = logging.getLogger()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(root, "handlers", [])
    setup_logging()
    screen.write("compiling: 30%")
    logging.getLogger("jaxserve.test").info("hello")
    text = screen.getvalue().removeprefix("compiling: 30%")
    assert text.startswith(CLEAR_LINE) == terminal and text.endswith("INFO jaxserve.test: hello\n")


def test_where_several_processes_log_a_line_says_which_one(monkeypatch: pytest.MonkeyPatch):
    screen = Screen(False)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    before = logging.getLogger("jaxserve").level
    setup_logging(logging.WARNING, "HTTP process 2 of 4")
    logging.getLogger("jaxserve.test").info("what each of them would say")
    logging.getLogger("jaxserve.test").warning("100%")
    assert screen.getvalue().endswith("WARNING jaxserve.test (HTTP process 2 of 4): 100%\n")
    logging.getLogger("jaxserve").setLevel(before)
    assert "would say" not in screen.getvalue()
