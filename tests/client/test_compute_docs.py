"""The examples in README.md and docs/compute-access.md run as they stand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compute_access import rig

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_a_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Admit, write, flush, admit again: the lines say what the comments beside them say."""
    with rig(tmp_path, change=lambda _: {"block_tokens": 16}) as pool:
        monkeypatch.setenv("KVPLANE_ADDRESS", pool.service.address)
        (example,) = re.findall(r"```python\n(import torch.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        capsys.readouterr()
        names: dict[str, Any] = {}
        exec(example, names)
        printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("20")]
        assert printed == ["NEVER_SEEN", "96 FULL"]
        q, v = (names[name].double().transpose(0, 1) for name in ("key", "value"))
        exact = torch.nn.functional.scaled_dot_product_attention(q, q, v, is_causal=True).transpose(0, 1)
        for out in names["outputs"]:
            torch.testing.assert_close(out.double(), exact, rtol=2e-5, atol=2e-5)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "compute-access.md").read_text()
    with rig(tmp_path) as pool:
        monkeypatch.setenv("KVPLANE_ADDRESS", pool.service.address)
        names: dict[str, Any] = {}
        (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        exec(example, names)
        q, k, v = (names[name].double().transpose(0, 1) for name in ("query", "key", "value"))
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(names["out"].double(), exact.transpose(0, 1), rtol=2e-5, atol=2e-5)
