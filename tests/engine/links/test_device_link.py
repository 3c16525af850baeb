"""Copies between devices of torch, of which this machine has one that is there twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from appliance.engine.links.device_link import DeviceLink
from appliance.engine.links.link import LinkPath, LinkTimeoutError
from appliance.engine.links.trial import try_link

CPU = torch.device("cpu")


@pytest.mark.parametrize("path", [LinkPath.PEER, LinkPath.HOST])
def test_data_come_back(path: LinkPath) -> None:
    data = np.arange(50, dtype=np.float32)
    back, seconds = DeviceLink(CPU, CPU, path).echo(data, 3, 60.0)
    assert np.array_equal(back, data)
    assert seconds > 0
    with pytest.raises(LinkTimeoutError):
        DeviceLink(CPU, CPU, path).echo(data, 3, 0.0)


@pytest.mark.parametrize("path", [LinkPath.PEER, LinkPath.HOST])
def test_a_copy_that_does_nothing_is_seen(path: LinkPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *args, **options: self)
    found = try_link(DeviceLink(CPU, CPU, path), 1, 60.0)
    assert "changes data: 16 of 16" in found.problem
