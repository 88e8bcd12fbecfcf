"""The README as a package index shows it: relative links and pictures lead to the repository of `[project.urls]`."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


def absolute(link: re.Match[str]) -> str:
    """A link to a page, or to a picture itself."""
    return f"{link[1]}{link[2]}({SOURCE}/{'raw' if link[1] else 'blob'}/main/{link[3]})"


readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(long_description=LINK.sub(absolute, readme), long_description_content_type="text/markdown")
