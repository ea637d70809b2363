"""Kernels planted wrong are caught by the check that must catch them; right ones pass; real candidates pass."""

from pathlib import Path

import pytest

from autosel import fingerprint
from autosel.candidates import registry
from autosel.candidates.base import Candidate
from autosel.errors import ParityError, UnknownName
from autosel.native.compile import find_compiler
from autosel.ops import OPS
from autosel.parity.check import Proof, Terms, check, check_all, plain
from autosel.parity.reproduce import built, reproduce
from autosel.values import Accepted, Failed, Knobs, Passed, PythonRecipe, canonical_json

HERE = str(Path(__file__).parent)
RMSNORM = OPS["rmsnorm"].workload("bf16", {"M": 3, "d": 512})
LINEAR = OPS["linear"].workload("bf16", {"M": 2, "N": 320, "K": 1100})
RMSNORM_FP32 = OPS["rmsnorm"].workload("fp32", {"M": 3, "d": 512})


class Planted(Candidate):
    backend = "USER"

    def __init__(self, op, function, *, writes_out=True, deterministic=True):
        self.op, self.name, self.function = op, f"user:{function}", function
        self.writes_out, self.deterministic = writes_out, deterministic

    def supports(self, w, fp):
        return Accepted()

    def recipe(self, w, fp, knobs):
        return PythonRecipe(target=f"planted:{self.function}", path=HERE)


def proof(function, workload=RMSNORM, **properties):
    candidate = Planted(workload.op, function, **properties)
    recipe = candidate.recipe(workload, None, Knobs())
    return Proof(candidate=candidate, recipe=recipe, digest=function, knobs=Knobs(), workload=workload)


def functional(function, workload=RMSNORM):
    return proof(function, workload, writes_out=False)


WRONG = [
    (proof("writes_past_the_end"), {"guards"}),
    (proof("writes_before_the_start"), {"guards"}),
    (proof("writes_into_the_gaps"), {"guards"}),
    (proof("reads_past_the_end"), {"outside_reads"}),
    (proof("changes_its_input"), {"inputs"}),
    (proof("changes_its_weight"), {"inputs"}),
    (proof("ignores_strides"), {"outside_reads"}),
    (proof("writes_nothing"), {"unwritten"}),
    (proof("leaves_the_tail"), {"unwritten"}),
    (proof("leaves_the_last_row"), {"unwritten"}),
    (functional("one_static_buffer"), {"retention"}),
    (proof("writes_late"), {"retention", "guards", "inputs", "repeat", "outside_reads"}),
    (proof("remembers_by_address"), {"anti_cache", "outside_reads", "elements"}),
    (proof("packs_weights_by_address", LINEAR), {"anti_cache", "elements"}),
    (proof("zeros"), {"elements"}),
    (proof("truncates"), {"elements", "rmse", "bias"}),
    (proof("sums_in_half"), {"elements"}),
    (proof("swallows_nan"), {"nan_pattern"}),
    (proof("wrong_at_one_width"), {"elements"}),
    (proof("a_bit_too_large"), {"bias", "elements"}),
    (proof("forgets_the_last_k", LINEAR), {"elements"}),
    (proof("flips_a_coin"), {"repeat"}),
    (proof("returns_none"), {"result"}),
    (proof("returns_a_copy"), {"result"}),
    (functional("returns_wider"), {"result"}),
    (functional("returns_a_row_too_few"), {"result"}),
    (functional("returns_a_subclass"), {"result"}),
    (functional("returns_on_its_side"), {"result"}),
    (proof("leaks"), {"leak"}),
    (proof("raises"), {"raised"}),
    (proof("raises_at_one_width"), {"raised"}),
]
RIGHT = [
    proof("right"),
    proof("right", RMSNORM_FP32),
    functional("allocates"),
    proof("returns_a_list"),
    proof("computes_in_double"),
    proof("rounds_twice"),
    proof("writes_in_two_halves"),
    proof("keeps_a_workspace"),
    proof("spreads_a_little", deterministic=False),
]


@pytest.fixture(scope="module")
def verdicts():
    """All planted kernels that leave their process in order, in one worker: it starts once."""
    proofs = [p for p, _ in WRONG] + RIGHT
    return dict(zip(map(_id, proofs), check_all(proofs), strict=True))


def _id(p):
    return f"{p.digest} {p.workload.dtype}"


@pytest.mark.parametrize(("planted", "checks"), WRONG, ids=[_id(p) for p, _ in WRONG])
def test_a_wrong_kernel_is_caught_by_the_check_that_is_for_it(verdicts, planted, checks):
    found = verdicts[_id(planted)]
    assert isinstance(found, Failed)
    assert found.check in checks, found
    assert found.reason
    assert found.case


@pytest.mark.parametrize("planted", RIGHT, ids=map(_id, RIGHT))
def test_a_right_kernel_passes_however_unusual(verdicts, planted):
    found = verdicts[_id(planted)]
    assert isinstance(found, Passed), found
    assert found.cases > 30
    assert 0 < found.worst <= 1


def test_an_undeclared_spread_is_refused(verdicts):
    found = check(proof("spreads_a_little", RMSNORM_FP32))
    assert isinstance(found, Failed)
    assert found.check == "repeat"


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("sets_threads", "torch threads"),
        ("seeds_the_generator", "torch random state"),
        ("flushes_subnormals", "subnormals"),
    ],
)
def test_a_kernel_that_changes_the_process_is_refused(function, what):
    found = check(proof(function))
    assert isinstance(found, Failed)
    assert found.check == "global_state"
    assert what in found.evidence


def test_a_process_left_changed_is_not_blamed_on_the_next_candidate():
    changed, passed = check_all([proof("sets_threads"), proof("right")])
    assert isinstance(changed, Failed)
    assert isinstance(passed, Passed)


def test_a_crash_is_recorded_and_the_next_proof_gets_a_new_worker():
    crashed, passed = check_all([proof("crashes_on_nan"), proof("right")])
    assert isinstance(crashed, Failed)
    assert (crashed.check, crashed.evidence["cause"]) == ("crash", "SIGSEGV")
    assert crashed.case == "nan"
    assert isinstance(passed, Passed)


def test_a_hang_ends_at_the_deadline():
    found = check(proof("hangs"), call_deadline_s=2.0)
    assert isinstance(found, Failed)
    assert (found.check, found.evidence["cause"]) == ("timeout", "timeout in request")


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


def test_the_reason_names_the_element_and_the_bound(verdicts):
    found = verdicts["wrong_at_one_width bf16"]
    assert "d127" in found.case
    assert {"index", "got", "reference", "allowed"} <= set(found.evidence)


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def device():
    return fingerprint.take("cpu")


def test_one_case_can_be_run_alone(device):
    said = reproduce(Planted("rmsnorm", "wrong_at_one_width"), RMSNORM, device, "strided rows")
    assert 'passed case "strided rows" (row strides ignored)' in said
    with pytest.raises(ParityError, match="strided rows") as refused:
        reproduce(Planted("rmsnorm", "ignores_strides"), RMSNORM, device, "strided rows")
    assert "outside its inputs" in refused.value.why
    with pytest.raises(ParityError, match='check "repeat"'):
        reproduce(Planted("rmsnorm", "flips_a_coin"), RMSNORM, device, "repeated calls")
    with pytest.raises(UnknownName, match="did you mean strided rows"):
        reproduce(Planted("rmsnorm", "right"), RMSNORM, device, "strided row")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_baseline_and_our_kernel_pass(device, dtype):
    w = OPS["rmsnorm"].workload(dtype, {"M": 4, "d": 4096})
    for candidate in registry.all_candidates("rmsnorm"):
        if candidate.backend == "INDUCTOR" or (candidate.backend == "CPP" and find_compiler() is None):
            continue
        found = check(built(candidate, w, device), fp=device)
        assert isinstance(found, Passed), (candidate.name, found)
