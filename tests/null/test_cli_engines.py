"""Test which device's decisions `export --to` writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autosel import fingerprint
from autosel.cli import device, engines
from autosel.errors import UsageError
from autosel.fingerprint import known
from autosel.integrations.engines import hf_kernels
from autosel.ledger import store

GPU = known.load("h200")
OTHER = replace(GPU, identity={**GPU.identity, "ecc": False})


@pytest.mark.parametrize("meant", ["cpu", "cuda"])
def test_a_package_of_kernels_is_for_the_default_device(
    meant: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fps = {"cpu": known.load("h200"), "cuda": OTHER}
    given: list[Any] = []
    served = [SimpleNamespace(decision=SimpleNamespace(hw_id=fp.hw_id, of=name)) for name, fp in fps.items()]

    class Ledger:
        def __enter__(self) -> Any:
            return SimpleNamespace(serving=lambda: served)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(store, "open_ledger", Ledger)
    monkeypatch.setattr(device, "default_device", lambda: meant)
    monkeypatch.setattr(device, "identity", fps.__getitem__)
    monkeypatch.setattr(fingerprint, "take", fps.__getitem__)
    monkeypatch.setattr(hf_kernels, "export", lambda *asked: given.append(asked))
    engines._hf_kernels(tmp_path)
    ((fp, decisions, _),) = given
    assert fp is fps[meant] and [d.of for d in decisions] == [meant]


def test_devices_of_one_name_that_differ_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = {GPU.hw_id: (GPU, ["a"]), OTHER.hw_id: (OTHER, ["b"])}
    monkeypatch.setattr(device, "here", lambda: [("cuda:0", OTHER)])
    assert engines._of_one(GPU, found) == ("a",)
    elsewhere = replace(GPU, identity={**GPU.identity, "ecc": None})
    assert engines._of_one(elsewhere, found) == ("b",), "the device of this machine is not used"
    assert engines._device("vllm", None, [GPU, OTHER]) is OTHER
    monkeypatch.setattr(device, "here", list)
    with pytest.raises(UsageError, match="ambiguous device") as error:
        engines._of_one(elsewhere, found)
    assert "2 different devices" in error.value.why
    with pytest.raises(UsageError, match="ambiguous device"):
        engines._device("vllm", None, [GPU, OTHER])
    assert engines._of_one(elsewhere, {GPU.hw_id: (GPU, ["a"])}) == ("a",)  # type: ignore[dict-item,list-item]
