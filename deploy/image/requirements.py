"""What the images install: `python3 requirements.py pyproject.toml EXTRA...` prints the project's own requirements."""

import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    """Requirements of the project with extras, those that name another extra of it resolved."""
    name, optional = project["name"], project["optional-dependencies"]
    dependencies = project["dependencies"]
    assert isinstance(optional, dict)
    assert isinstance(dependencies, list)
    found: list[str] = list(dependencies)
    for extra in extras:
        for each in optional[extra]:
            if each.startswith(f"{name}["):
                found += requirements(project, each.removeprefix(f"{name}[").rstrip("]").split(","))
            else:
                found.append(each)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    for line in requirements(tomllib.loads(Path(sys.argv[1]).read_text())["project"], sys.argv[2:]):
        print(line)
