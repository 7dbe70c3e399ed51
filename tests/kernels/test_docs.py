"""The example in docs/kernels.md runs as it stands."""

import re
from pathlib import Path
from typing import Any

import torch


def test_the_example_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(example, names)
    assert names["out"].shape == (66, 32, 128)
    assert torch.isfinite(names["lse"]).all()
