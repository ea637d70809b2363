"""Test proofs of real candidates, timeouts, and single cases. Planted kernels: test_parity_check_plants.py."""

import pytest

from autosel import fingerprint
from autosel.candidates import registry
from autosel.errors import ParityError, UnknownName
from autosel.ops import OPS
from autosel.parity.check import Proof, Terms, check, check_all, plain
from autosel.parity.reproduce import reproduce
from autosel.parity.session import built
from autosel.values import Accepted, Failed, Knobs, Passed, PythonRecipe, canonical_json
from tests import drawn
from tests.cpu.planting import RMSNORM, Planted, proof
from tests.onednn import products_leak

pytestmark = pytest.mark.usefixtures("preforked")


def test_a_hang_ends_at_the_deadline():
    found = check(proof("hangs"), call_deadline_s=2.0)
    assert isinstance(found, Failed)
    assert (found.check, found.evidence["cause"]) == ("timeout", "timeout in request")


def test_a_library_that_compiles_at_its_first_call_gets_the_time_that_it_declares():
    slow = proof("compiles_at_its_first_call")
    found = check(slow, call_deadline_s=2.0)
    assert isinstance(found, Failed) and found.check == "timeout"
    slow.candidate.first_call_s = 60.0
    assert isinstance(check(slow, call_deadline_s=2.0), Passed)


def test_a_proof_that_takes_too_long_as_a_whole_ends():
    (found,) = check_all([proof("dawdles")], terms=Terms(proof_deadline_s=1.0))
    assert isinstance(found, Failed)
    assert found.check == "timeout"


def test_evidence_can_always_be_stored():
    seen = {"ratio": float("inf"), "token": -(2**62), "index": [1, (2, float("nan"))], "check": True, "value": 0.5}
    stored = plain(seen)
    assert stored == {"ratio": "inf", "token": str(-(2**62)), "index": [1, [2, "nan"]], "check": True, "value": 0.5}
    assert canonical_json(stored)


def test_a_module_that_is_not_there_is_named():
    candidate = Planted("rmsnorm", "right")
    recipe = PythonRecipe(target="no_such_module:f")
    found = check(Proof(candidate=candidate, recipe=recipe, digest="x", knobs=Knobs(), workload=RMSNORM))
    assert isinstance(found, Failed)
    assert found.check == "raised"
    assert "no_such_module" in found.reason


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def device():
    return fingerprint.take("cpu")


def test_one_case_can_be_run_alone(device):
    said = reproduce(Planted("rmsnorm", "wrong_at_one_width"), RMSNORM, device, "strided rows", "a text")
    assert 'passed case "strided rows" (row strides ignored)' in said
    with pytest.raises(ParityError, match="strided rows") as refused:
        reproduce(Planted("rmsnorm", "ignores_strides"), RMSNORM, device, "strided rows", "a text")
    assert "outside its inputs" in refused.value.why
    with pytest.raises(ParityError, match='check "repeat"'):
        reproduce(Planted("rmsnorm", "flips_a_coin"), RMSNORM, device, "repeated calls", "a text")
    with pytest.raises(UnknownName, match="did you mean strided rows"):
        reproduce(Planted("rmsnorm", "right"), RMSNORM, device, "strided row", "a text")
    assert "passed case" in reproduce(Planted("rmsnorm", "right"), RMSNORM, device, "random at M3 d512", "a text")


@pytest.mark.parametrize(
    ("op", "dims", "traits", "shift"),
    drawn.share(
        [
            pytest.param("rmsnorm", {"M": 4, "d": 4096}, {}, 1, id="rmsnorm"),
            pytest.param("lm_head", {"M": 2, "V": 300, "d": 64}, {"greedy": 1}, 0, id="greedy lm_head"),
        ],
        days=2,
    ),
)
def test_the_baseline_and_our_kernel_pass(device, op, dims, traits, shift):
    """Prove in one dtype a day: tests of the kernels run every dtype."""
    w = OPS[op].workload(drawn.todays(("bf16", "fp32"), shift), dims, **traits)
    for candidate in (c for c in registry.all_candidates(op) if c.backend != "INDUCTOR"):
        # Without candidates that need a missing compiler or device, or another dtype.
        if isinstance(registry.support_of(candidate, w, device), Accepted):
            (found,) = check_all([built(candidate, w, device)], fp=device)
            leaks = candidate.backend == "TORCH" and isinstance(found, Failed) and found.check == "outside_reads"
            assert isinstance(found, Passed) or (leaks and products_leak()), (candidate.name, found)
