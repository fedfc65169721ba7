"""`python3 deploy/requirements.py EXTRA...`: what pyproject.toml needs, one a line, without the package itself.

For the images: dependencies become a layer of their own, which stays the same while only the code changes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str], pyproject: Path) -> list[str]:
    """The dependencies of the package and of these extras, sorted. Raises KeyError for an extra that is not there."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    wanted = set(project["dependencies"])
    for extra in extras:
        wanted |= set(project["optional-dependencies"][extra])
    return sorted(wanted)


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(sys.argv[1:], Path(__file__).parents[1] / "pyproject.toml")) + "\n")
