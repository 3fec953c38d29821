"""Memory that nobody wrote, made visible."""

import pytest
import torch
from torch import Tensor


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, integers far out of range, and bytes that are NaN as E4M3 and as BF16."""
    original = torch.empty

    def empty(*shape: object, **options: object) -> Tensor:
        out = original(*shape, **options)  # type: ignore[call-overload]
        if out.dtype.is_floating_point:
            return out.fill_(torch.nan)
        return out.fill_(255 if out.dtype == torch.uint8 else torch.iinfo(out.dtype).min // 2)

    monkeypatch.setattr(torch, "empty", empty)
    assert original(0).numel() == 0 and torch.empty(1).isnan()
