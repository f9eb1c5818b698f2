"""Lets the tests here import parser_cases, which importlib import mode would not find."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
