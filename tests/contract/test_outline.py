"""The API does not change unseen, and never breaks v1."""

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from contract import outline

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]
BUF = Path(sys.executable).with_name("buf")


def buf(*arguments: str | Path) -> None:
    """Run buf and fail with what it printed."""
    done = subprocess.run([BUF, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"buf {arguments[0]}:\n{done.stdout}{done.stderr}")


def test_outline_is_the_reviewed_one() -> None:
    """Every field, number, label, type and RPC is as in golden/outline.txt."""
    reviewed = (GOLDEN / "outline.txt").read_text().splitlines()
    changes = list(difflib.unified_diff(reviewed, list(outline.lines()), "reviewed", "now", lineterm="", n=1))
    if changes:
        pytest.fail("the API changed; if this is meant, run `make golden` and review:\n" + "\n".join(changes))


def test_protos_pass_lint() -> None:
    """Names, files and comments follow the STANDARD and COMMENTS rules."""
    buf("lint", "protos")


@pytest.mark.parametrize("image", sorted(GOLDEN.glob("*.binpb")), ids=lambda path: path.stem)
def test_protos_do_not_break_a_release(image: Path) -> None:
    """A client of any released 1.x contract still works."""
    buf("breaking", "protos", "--against", image)


def test_an_image_of_the_last_release_is_there() -> None:
    """The breaking check compares with something."""
    assert (GOLDEN / "0.1.0.binpb").stat().st_size > 10_000
