"""Test decisions carried to a host without a shared database: signed, proven there, and only then served."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from autosel import fingerprint
from autosel.candidates import registry
from autosel.certify import sign
from autosel.cli import bundle
from autosel.errors import BadConfig
from autosel.ledger import Ledger, open_ledger
from autosel.ledger.commands import Adopt, Import
from autosel.ledger.key import current_mode
from autosel.tuning.adopt import adopt
from autosel.tuning.shortlist import way_of
from autosel.values import Accepted, Arm, Fingerprint, PythonRecipe, Workload
from tests.cpu.daemons import cli
from tests.cpu.test_ledger import FAILED, PASSED, record
from tests.quiet import Quiet

pytestmark = pytest.mark.usefixtures("preforked")

W = Workload(op="rmsnorm", dims=(("M", 1), ("d", 64)), dtype="fp32", traits=())


@pytest.fixture(scope="module")
def fp() -> Fingerprint:
    return fingerprint.take("cpu")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return open_ledger(home=tmp_path / "from", alone=True)


@pytest.fixture
def there(tmp_path: Path) -> Ledger:
    return open_ledger(home=tmp_path / "to", alone=True)


def measured(ledger: Ledger, fp: Fingerprint, **changes: Any) -> Any:
    """Return a decision for a real arm, as a tune on a host of this kind would have recorded it."""
    base = way_of(registry.baseline(W.op), W, fp)
    offered = [c for c, support in registry.eligible(W, fp) if isinstance(support, Accepted)]
    arm = changes.pop("arm", next(way_of(c, W, fp).arm for c in offered if c.backend == "CPP"))
    w = {"workload": W, "fp": fp, "race": None, "mode": current_mode(), "baseline": base.arm}
    return record(ledger, arm=arm, parities=[(arm, PASSED)], **{**w, **changes})


def test_a_decision_is_adopted_after_building_and_proving_its_kernel_here(
    ledger: Ledger, there: Ledger, fp: Fingerprint
) -> None:
    made = measured(ledger, fp)
    (waiting,) = there.write(Import(document=ledger.export(), hw_id=fp.hw_id)).waiting
    (found,) = adopt(there, fp, Quiet())
    assert (found.decision.id, found.reason) == (waiting, "")
    assert [s.decision.arm for s in there.serving()] == [made.arm]
    assert list(adopt(there, fp, Quiet())) == [], "once"


def test_an_arm_with_another_build_here_is_not_adopted(ledger: Ledger, there: Ledger, fp: Fingerprint) -> None:
    good, homes = measured(ledger, fp).arm, count()

    def refused(**changes: Any) -> str:
        values = {name: getattr(good, name) for name in ("candidate", "backend", "recipe", "knobs", "digest", "build")}
        with open_ledger(home=there.home / str(next(homes)), alone=True) as source:
            measured(source, fp, arm=Arm(**{**values, **changes}))
            there.write(Import(document=source.export(), hw_id=fp.hw_id))
        (found,) = adopt(there, fp, Quiet())
        assert there.serving() == ()
        return found.reason

    assert "another build here" in refused(digest="e" * 64)
    assert "another build here" in refused(recipe=PythonRecipe(target="autosel.candidates.torch_eager:rmsnorm"))
    assert "candidate cpp:nosuch does not exist here" in refused(candidate="cpp:nosuch")
    assert "another build here" in refused(knobs={**good.knobs, "threads": 77})


def test_a_bundle_comes_back_with_its_host_and_signer(ledger: Ledger, tmp_path: Path, fp: Fingerprint) -> None:
    measured(ledger, fp)
    key = sign.make_key(tmp_path / "key.pem")
    content = bundle.text(bundle.make(ledger.export(), key)).encode()
    found = bundle.read(content, "it", signer=sign.public_hex(key))
    assert found.decisions == ledger.export()
    assert found.signer == sign.public_hex(key)
    assert found.host is not None and len(found.host.id) == 32


def test_a_bundle_edited_anywhere_or_signed_by_another_is_refused(
    ledger: Ledger, tmp_path: Path, fp: Fingerprint
) -> None:
    measured(ledger, fp)
    key, other = sign.make_key(tmp_path / "key.pem"), sign.make_key(tmp_path / "other.pem")
    made = bundle.make(ledger.export(), key)
    edited = [
        {**made, "host": {**made["host"], "name": "better"}},
        {**made, "created_at": "2000-01-01T00:00:00+00:00"},
        {**made, "signer": sign.public_hex(other)},
        {**made, "decisions": {**made["decisions"], "epoch": 99}},
        {**made, "signature": {**made["signature"], "value": "0" * 128}},
        {**made, "signature": {"algorithm": "none", "value": made["signature"]["value"]}},
        {**made, "signature": None},
        {**made, "signer": None},
        {**made, "host": {}},
        {**made, "more": 1},
        {**made, "version": 2},
        {name: value for name, value in made.items() if name != "signature"},
    ]
    for document in edited:
        with pytest.raises(BadConfig):
            bundle.read(json.dumps(document).encode(), "it")
    whole = json.dumps(made).encode()
    for content in (whole[:-20], b"", b"{}", b"[]", b"\xff"):
        with pytest.raises(BadConfig):
            bundle.read(content, "it")
    with pytest.raises(BadConfig, match="another key"):
        bundle.read(whole, "it", signer=sign.public_hex(other))
    with pytest.raises(BadConfig, match="not signed"):
        bundle.read(json.dumps(ledger.export()).encode(), "it", signer=sign.public_hex(key))


def test_the_commands_carry_decisions_from_home_to_home(
    ledger: Ledger, there: Ledger, tmp_path: Path, fp: Fingerprint
) -> None:
    measured(ledger, fp)
    path = tmp_path / "bundle.json"
    made = cli(ledger.home, "export", "--sign", str(path))
    assert made.returncode == 0, made.stderr
    signer = json.loads(path.read_text())["signer"]
    assert signer in made.stderr
    refused = cli(there.home, "import", str(path), "--key", "0" * 64)
    assert refused.returncode == 2 and "another key" in refused.stderr
    taken = cli(there.home, "import", str(path), "--key", signer, "--no-check")
    assert "1 wait for a proof" in taken.stdout, taken
    (waiting,) = there.offered(fp.hw_id, current_mode())
    assert not there.write(Adopt(decision_id=waiting.id, parity=FAILED))
    assert there.write(Adopt(decision_id=waiting.id, parity=PASSED))
