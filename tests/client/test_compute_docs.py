"""The example in docs/compute-access.md runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compute_access import rig


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "compute-access.md").read_text()
    with rig(tmp_path) as pool:
        monkeypatch.setenv("KVPLANE_ADDRESS", pool.service.address)
        names: dict[str, Any] = {}
        (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        exec(example, names)
        q, k, v = (names[name].double().transpose(0, 1) for name in ("query", "key", "value"))
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(names["out"].double(), exact.transpose(0, 1), rtol=2e-5, atol=2e-5)
