"""Test the registry, users' candidates, plug-ins, calls of functions, and digests of arms."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autosel
from autosel import settings
from autosel.candidates import arms, plugins, registry, user
from autosel.candidates.base import Candidate
from autosel.candidates.convention import parameters_in_source, parameters_of, takes_outputs
from autosel.candidates.load import load, load_python
from autosel.candidates.source import find_source, function_digest, module_digest
from autosel.decode import question
from autosel.errors import BadArguments, BadConfig, BuildError, UnknownName, UsageError
from autosel.ops import OPS
from autosel.ops.contract import DTYPE, Op
from autosel.values import Accepted, Fingerprint, Knob, Knobs, NativeRecipe, PythonRecipe, Rejected, Workload

CPU = Fingerprint(
    kind="cpu",
    name="made up",
    identity={"cpus": 2, "isa": ["avx2", "fma", "f16c"], "l1d_bytes": 32768, "l2_bytes": 1 << 20, "l3_bytes": 1 << 25},
    environment={},
    rates={},
)
ROOT = Path(__file__).resolve().parents[2]
NORM = Workload(op="rmsnorm", dims=(("M", 1), ("d", 4096)), dtype="bf16")


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(user, "_REGISTERED", {})
    plugins.load_allowed.cache_clear()
    yield
    plugins.load_allowed.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder whose modules can be imported; they are removed from sys.modules afterwards."""
    before = set(sys.modules)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importlib.invalidate_caches()


def module(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    importlib.invalidate_caches()
    return file


def imported(folder: Path, name: str) -> Any:
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


# --- registry --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_baseline_that_comes_first(op: str) -> None:
    first, *rest = registry.all_candidates(op)
    assert first is registry.baseline(op)
    assert first.backend == "TORCH"
    assert all(c.op == op for c in (first, *rest))


def test_a_candidate_is_found_by_name_in_either_case_and_a_wrong_one_suggests() -> None:
    assert registry.find("attn", "TORCH:PACKED").name == "torch:packed"
    with pytest.raises(UnknownName, match="did you mean torch:packed"):
        registry.find("attn", "torch:pakced")
    with pytest.raises(UnknownName, match="unknown op"):
        registry.find("attention", "torch:packed")


def test_a_compiling_candidate_waits_for_full_effort() -> None:
    quick = [c.name for c, _ in registry.eligible(NORM, CPU)]
    full = [c.name for c, _ in registry.eligible(NORM, CPU, "full")]
    assert "inductor:rmsnorm" not in quick
    assert set(full) - set(quick) == {"inductor:rmsnorm"}


def test_inductor_refuses_a_bucket_that_holds_several_shapes() -> None:
    inductor = registry.find("rmsnorm", "inductor:rmsnorm")
    refused = inductor.supports(NORM.at(M=9), CPU)
    assert isinstance(refused, Rejected) and "M = 8" in refused.reason


def test_torch_refuses_fp8_with_a_reason() -> None:
    answers = dict(registry.eligible(Workload(op="rmsnorm", dims=NORM.dims, dtype="fp8_e4m3"), CPU, "full"))
    for candidate, answer in answers.items():
        assert isinstance(answer, Rejected), candidate.name
        assert "fp8_e4m3" in answer.reason


# --- the decorator ---------------------------------------------------------------------------------------------------


def norm(x: Any, weight: Any, eps: float, offset: float) -> Any:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * rstd * (weight.float() + offset)).to(x.dtype)


def norm_into(x: Any, weight: Any, eps: float, offset: float, out: Any = None) -> Any:
    made = norm(x, weight, eps, offset)
    return made if out is None else out.copy_(made)


def test_a_decorated_function_stays_itself_and_becomes_a_candidate() -> None:
    assert autosel.candidate("rmsnorm", name="mine", dtypes=("bf16",))(norm) is norm
    mine = registry.find("rmsnorm", "user:mine")
    assert mine in registry.all_candidates("rmsnorm")
    assert (mine.backend, mine.deterministic, mine.writes_out) == ("USER", True, False)
    assert isinstance(mine.supports(NORM, CPU), Accepted)
    refused = mine.supports(Workload(op="rmsnorm", dims=NORM.dims, dtype="fp32"), CPU)
    assert refused == Rejected(reason="supports bf16; the workload is fp32")


def test_the_recipe_of_a_decorated_function_finds_it_from_any_folder() -> None:
    autosel.candidate("rmsnorm")(norm)
    recipe = registry.find("rmsnorm", "user:norm").recipe(NORM, CPU, Knobs())
    assert isinstance(recipe, PythonRecipe)
    assert recipe.target == f"{__name__}:norm"
    assert Path(recipe.path).is_absolute()
    assert find_source(__name__, recipe.path) == Path(__file__)
    assert load_python(recipe) is norm


def test_a_function_that_takes_outputs_is_known_to_write_them() -> None:
    autosel.candidate("gemv", name="out")(lambda_free_linear)
    assert registry.find("linear", "user:out").writes_out


def lambda_free_linear(x: Any, w: Any, bias: Any, residual: Any, out: Any) -> Any:
    return out


@pytest.mark.parametrize(
    ("allows", "expected"),
    [
        (lambda w, fp: True, None),
        (lambda w, fp: None, None),
        (lambda w, fp: "", None),
        (lambda w, fp: Accepted(), None),
        (lambda w, fp: False, "its supports() refused it"),
        (lambda w, fp: "needs M = 2" if w["M"] != 2 else True, "needs M = 2"),
        (lambda w, fp: Rejected(reason="not here"), "not here"),
        (lambda w, fp: w["nonsense"] > 0, "its supports() raised KeyError"),
        (lambda w: True, "its supports() raised TypeError"),
    ],
)
def test_the_result_of_supports_is_used_and_its_errors_are_reported(allows: Any, expected: str | None) -> None:
    autosel.candidate("rmsnorm", supports=allows)(norm)
    answer = {c.name: a for c, a in registry.eligible(NORM, CPU)}["user:norm"]
    if expected is None:
        assert isinstance(answer, Accepted)
    else:
        assert isinstance(answer, Rejected)
        assert answer.reason.startswith(expected)


def test_a_candidate_class_of_a_package_that_raises_is_left_out_alone() -> None:
    class Broken(Candidate):
        name, op, backend = "user:broken", "rmsnorm", "USER"

        def supports(self, w: Workload, fp: Fingerprint) -> Any:
            raise ZeroDivisionError("no")

        def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> PythonRecipe:
            return PythonRecipe(target="a:b")

    user.register(Broken())
    answers = {c.name: a for c, a in registry.eligible(NORM, CPU)}
    assert answers["user:broken"] == Rejected(reason="its supports() raised ZeroDivisionError: no")
    assert isinstance(answers["torch:rmsnorm"], Accepted)


def test_a_candidate_that_no_worker_could_import_is_refused_at_once() -> None:
    def inner(x: Any, weight: Any, eps: float, offset: float) -> Any: ...

    with pytest.raises(UsageError, match="define it at the top level"):
        autosel.candidate("rmsnorm")(inner)
    prompt: dict[str, Any] = {"__name__": "nowhere"}
    exec("def f(x, weight, eps, offset): ...", prompt)
    with pytest.raises(UsageError, match=r"into a \.py file"):
        autosel.candidate("rmsnorm")(prompt["f"])


def short(x: Any, weight: Any) -> Any: ...
def long(x: Any, weight: Any, eps: float, offset: float, out: Any, more: Any) -> Any: ...
def keyword(x: Any, weight: Any, eps: float, offset: float, *, fast: bool) -> Any: ...


@pytest.mark.parametrize("function", [short, long, keyword])
def test_a_function_that_cannot_be_called_as_the_op_is_shown_the_signature(function: Callable[..., Any]) -> None:
    with pytest.raises(UsageError) as caught:
        autosel.candidate("rmsnorm")(function)
    assert "(x, weight, eps, offset), or (x, weight, eps, offset, out)" in caught.value.why
    assert function.__name__ in caught.value.what


def test_names_are_checked_where_they_are_given() -> None:
    with pytest.raises(UnknownName, match="did you mean rmsnorm"):
        autosel.candidate("rmsnrom")
    with pytest.raises(UnknownName, match="unknown dtype 'bfloat16'"):
        autosel.candidate("rmsnorm", dtypes=("bfloat16",))
    with pytest.raises(UsageError, match="a name/with"):
        autosel.candidate("rmsnorm", name="a name/with")(norm)


def test_two_candidates_of_one_name_are_refused_and_one_registered_again_is_not() -> None:
    autosel.candidate("rmsnorm", name="mine")(norm)
    autosel.candidate("rmsnorm", name="mine")(norm)
    assert sum(c.name == "user:mine" for c in registry.all_candidates("rmsnorm")) == 1
    with pytest.raises(UsageError, match="two candidates for rmsnorm are called user:mine"):
        autosel.candidate("rmsnorm", name="mine")(norm_into)


# --- module:function, without importing ------------------------------------------------------------------------------

TRAP = "raise RuntimeError('imported')\n"


def test_a_target_is_read_without_importing_it(folder: Path) -> None:
    module(folder, "trap", TRAP + "def fast(x, weight, eps, offset):\n    return x\n")
    found = user.from_target("trap:fast", "rmsnorm", folder=folder)
    assert (found.name, found.target, found.path, found.writes_out) == ("user:fast", "trap:fast", str(folder), False)
    assert "trap" not in sys.modules


def test_a_target_in_a_package_is_found_by_the_packages_folder(folder: Path) -> None:
    module(folder, "pack/__init__", TRAP)
    module(folder, "pack/inner/__init__", TRAP)
    module(folder, "pack/inner/kernels", TRAP + "def fast(x, weight, eps, offset, out=None): ...\n")
    found = user.from_target("pack.inner.kernels:fast", "rmsnorm", folder=folder)
    assert (found.path, found.writes_out) == (str(folder), True)


def test_a_targets_decorator_is_obeyed_as_far_as_it_states_constants(folder: Path) -> None:
    text = (
        "import autosel\n"
        "@autosel.candidate('rmsnorm', name='mine', dtypes=('fp32',), deterministic=False, supports=lambda w, fp: 1)\n"
        "def fast(x, weight, eps, offset): ...\n"
    )
    module(folder, "decorated", text)
    found = user.from_target("decorated:fast", "rmsnorm", folder=folder)
    assert (found.name, found.dtypes, found.deterministic) == ("user:mine", ("fp32",), False)


def test_a_target_bound_by_assignment_or_import_is_accepted(folder: Path) -> None:
    module(folder, "bound", "from torch.nn.functional import rms_norm as borrowed\nfast = borrowed\n")
    for name in ("fast", "borrowed"):
        assert user.from_target(f"bound:{name}", "rmsnorm", folder=folder).target == f"bound:{name}"


@pytest.mark.parametrize("target", ["fast.py:norm", "fast", ":norm", "fast:", "../fast:norm", "fast:norm()", "a b:c"])
def test_an_invalid_target_gets_an_example(target: str) -> None:
    with pytest.raises(UsageError, match="module:function"):
        user.from_target(target, "rmsnorm")


def test_a_missing_target_suggests_existing_names(folder: Path) -> None:
    module(folder, "there", "def fast_rmsnorm(x, weight, eps, offset): ...\n")
    with pytest.raises(UnknownName, match="did you mean fast_rmsnorm"):
        user.from_target("there:fast_rmsnrom", "rmsnorm", folder=folder)
    with pytest.raises(BadConfig, match="no module nowhere"):
        user.from_target("nowhere:f", "rmsnorm", folder=folder)
    with pytest.raises(UsageError, match="cannot be called as rope"):
        user.from_target("there:fast_rmsnorm", "rope", folder=folder)
    module(folder, "broken", "def f(:\n")
    with pytest.raises(BadConfig, match="is not Python"):
        user.from_target("broken:f", "rmsnorm", folder=folder)


# --- how functions are called ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("x, weight, eps, offset", False),
        ("x, weight, eps, offset, out", True),
        ("x, weight, eps=1e-6, offset=0.0, out=None", True),
        ("x, weight, eps, offset, block=128", False),
        ("x, weight, eps, offset, out=None, block=128", True),
        ("*everything", True),
        ("x, weight, *rest", True),
        ("x, weight, eps, offset, /, *, block=128", False),
    ],
)
def test_output_parameters_are_read_equally_from_object_and_source(parameters: str, expected: bool) -> None:
    import ast

    text = f"def f({parameters}): ..."
    scope: dict[str, Any] = {}
    exec(text, scope)
    assert takes_outputs(OPS["rmsnorm"], parameters_of(scope["f"]), "f") is expected
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert parameters_in_source(node) == parameters_of(scope["f"])


def loaded(target: str, op: str = "rmsnorm") -> Callable[..., Any]:
    recipe = PythonRecipe(target=f"{__name__}:{target}", path=str(Path(__file__).parents[__name__.count(".")]))
    return load(OPS[op], recipe, "", {})


def test_a_function_that_returns_is_copied_into_the_outputs_it_is_given() -> None:
    op = OPS["rmsnorm"]
    inputs = op.inputs(NORM, 1)
    arguments = op.arguments(inputs)
    call, direct = loaded("norm"), norm(*arguments)
    assert torch.equal(call(*arguments, None), direct)
    assert torch.equal(call(*arguments), direct)
    out = torch.full_like(direct, 7.0)
    assert call(*arguments, out) is out
    assert torch.equal(out, direct)


def test_a_function_that_takes_outputs_is_called_directly() -> None:
    assert loaded("norm_into") is norm_into


def wrong_dtype(x: Any, weight: Any, eps: float, offset: float) -> Any:
    return norm(x, weight, eps, offset).float()


def wrong_shape(x: Any, weight: Any, eps: float, offset: float) -> Any:
    return norm(x, weight, eps, offset)[0]


def nothing(x: Any, weight: Any, eps: float, offset: float) -> Any: ...


@pytest.mark.parametrize(
    ("name", "told"), [("wrong_dtype", "float32[1, 4096]"), ("wrong_shape", "bfloat16[4096]"), ("nothing", "NoneType")]
)
def test_a_wrong_result_is_not_broadcast_or_converted_into_the_output(name: str, told: str) -> None:
    arguments = OPS["rmsnorm"].arguments(OPS["rmsnorm"].inputs(NORM, 1))
    with pytest.raises(BadArguments) as caught:
        loaded(name)(*arguments, torch.empty(1, 4096, dtype=torch.bfloat16))
    assert f"{name} returned {told} as rmsnorm's y" in caught.value.what
    assert caught.value.why == "expected bfloat16[1, 4096]"


def add_norm(x: Any, residual: Any, weight: Any, eps: float, offset: float, sandwich: int) -> Any:
    total = x + residual
    return norm(total, weight, eps, offset), total


def test_several_outputs_are_each_copied() -> None:
    op = OPS["add_rmsnorm"]
    w = Workload(op="add_rmsnorm", dims=(("M", 2), ("d", 8)), dtype="fp32")
    arguments = op.arguments(op.inputs(w, 1))
    outs = op.allocate(w, fill=7.0)
    got = loaded("add_norm", "add_rmsnorm")(*arguments, *outs)
    assert got[0] is outs[0]
    assert got[1] is outs[1]
    for given, direct in zip(outs, add_norm(*arguments), strict=True):
        assert given is not None
        assert torch.equal(given, direct)


def test_an_adapted_function_has_a_fixed_number_of_parameters() -> None:
    code = loaded("norm").__code__  # type: ignore[attr-defined]
    assert code.co_argcount == len(OPS["rmsnorm"].args) + 1
    assert not code.co_flags & 0x0C  # no *args, no **kwargs: a starred call costs more than the lookup before it


def test_a_module_of_the_same_name_from_elsewhere_is_refused(folder: Path) -> None:
    module(folder / "one", "twin", "def f(x, weight, eps, offset): ...\n")
    module(folder / "two", "twin", "def f(x, weight, eps, offset): ...\n")
    assert load_python(PythonRecipe(target="twin:f", path=str(folder / "one")))
    with pytest.raises(BuildError, match="is not the one in"):
        load_python(PythonRecipe(target="twin:f", path=str(folder / "two")))


def test_a_missing_or_non_function_target_is_reported(folder: Path) -> None:
    module(folder, "values", "number = 3\n")
    with pytest.raises(BuildError, match="cannot import"):
        load_python(PythonRecipe(target="absent_module:f", path=str(folder)))
    with pytest.raises(BuildError, match="is int, not a function"):
        load_python(PythonRecipe(target="values:number", path=str(folder)))
    with pytest.raises(UnknownName, match="number"):
        load_python(PythonRecipe(target="values:numbr", path=str(folder)))


# --- digests ---------------------------------------------------------------------------------------------------------


def test_a_users_digest_covers_the_module_and_its_own_helpers_only(folder: Path) -> None:
    module(folder, "pack/__init__", "")
    module(folder, "pack/kernel", "import torch\nfrom . import helper\nfrom pack.deep import thing\ndef f(): ...\n")
    module(folder, "pack/helper", "a = 1\n")
    module(folder, "pack/deep", "thing = 1\n")
    module(folder, "pack/other", "a = 1\n")
    first = module_digest("pack.kernel", str(folder))
    module(folder, "pack/other", "a = 2\n")
    assert module_digest("pack.kernel", str(folder)) == first
    seen = {first}
    for name, text in (("helper", "a = 2\n"), ("deep", "thing = 2\n"), ("kernel", "from . import helper\n")):
        module(folder, f"pack/{name}", text)
        seen.add(module_digest("pack.kernel", str(folder)))
    assert len(seen) == 4


def test_a_users_digest_does_not_depend_on_where_the_folder_lies(folder: Path) -> None:
    for place in ("here", "there"):
        module(folder / place, "kernel", "def f(): ...\n")
    assert module_digest("kernel", str(folder / "here")) == module_digest("kernel", str(folder / "there"))


def test_a_digest_of_a_missing_module_raises(folder: Path) -> None:
    with pytest.raises(BuildError, match="module gone_module no longer exists"):
        module_digest("gone_module", str(folder))
    with pytest.raises(BuildError, match=r"autosel\.ops\.eager no longer defines gone"):
        arms.python_digest(PythonRecipe(target="autosel.ops.eager:gone"))


@pytest.mark.parametrize("step", [question.WRITER, question.CAPTURER, question.EAGER], ids=lambda step: step.target)
def test_the_digest_of_a_step_covers_what_it_reaches_not_whole_modules(
    step: PythonRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "module_digest", lambda *_: pytest.fail("another op's edit would make it stale"))
    assert arms.python_digest(step)


def installed_in(site: Path, distribution: str, version: str, files: dict[str, str]) -> None:
    """Install a distribution's files like pip."""
    tops = sorted({name.partition("/")[0].removesuffix(".py") for name in files})
    info = {
        "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        "top_level.txt": "\n".join(tops),
    }
    for old in site.glob(f"{distribution}-*.dist-info"):
        shutil.rmtree(old)
    for name, text in {**files, **{f"{distribution}-{version}.dist-info/{n}": x for n, x in info.items()}}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


@pytest.mark.parametrize("where", ["beside the library", "above the environment"])
def test_a_digest_covers_a_kernels_own_modules_and_of_installed_libraries_the_version(
    where: str, tmp_path: Path
) -> None:
    """Include `library/parts`, a folder without __init__.py, like several packages that torch imports."""
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    library = {"library/__init__.py": "", "library/parts/one.py": "a = 1\n"}
    installed_in(site, "library", "1.0", library)
    own = {
        "kernel/__init__.py": "",
        "kernel/norm.py": "import _fast\nimport library.parts.one\n",
        "_fast.py": "a = 1\n",
    }
    folder = site if where == "beside the library" else tmp_path
    installed_in(folder, "kernels", "1.0", own)

    def found() -> str:
        path = "" if folder == site else str(folder)
        ask = f"from autosel.candidates.source import module_digest; print(module_digest('kernel.norm', {path!r}))"
        command = [str(tmp_path / "env" / "bin" / "python"), "-c", ask]
        done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = found()
    (site / "library" / "parts" / "one.py").write_text("a = 2\n")
    assert found() == first  # covered by the version
    installed_in(site, "library", "1.1", library)
    second = found()
    (folder / "_fast.py").write_text("a = 2\n")  # of the same distribution, under another name
    assert len({first, second, found()}) == 3


PACKAGE = '''
"""Ways."""
import torch
from own.shared import helper
LIMIT = 3

def one(x):
    """Does one."""
    return helper(x) + LIMIT  # a comment

def two(x):
    return torch.neg(x)
'''


def test_editing_one_of_our_functions_leaves_the_digests_of_the_others(folder: Path) -> None:
    from autosel.candidates import source

    def digests(package: str, shared: str) -> tuple[str, str]:
        source._definitions.cache_clear()
        function_digest.cache_clear()
        module(folder, "own/__init__", "")
        module(folder, "own/ways", package)
        module(folder, "own/shared", shared)
        return function_digest("own.ways", "one"), function_digest("own.ways", "two")

    sys.path.insert(0, str(folder))
    shared = "def helper(x):\n    return x\n\ndef unused(x):\n    return x\n"
    one, two = digests(PACKAGE, shared)
    unseen = PACKAGE.replace("a comment", "another").replace("Does one.", "Does it.")
    unreached = shared.replace("def unused(x):\n    return x", "def unused(x):\n    return -x")
    assert digests(unseen, shared) == digests(PACKAGE, unreached) == (one, two)
    for package, helpers in (
        (PACKAGE.replace("LIMIT = 3", "LIMIT = 4"), shared),
        (PACKAGE.replace("helper(x) +", "helper(x) -"), shared),
        (PACKAGE, shared.replace("return x\n", "return -x\n", 1)),
    ):
        changed = digests(package, helpers)
        assert changed[0] != one and changed[1] == two
    changed = digests(PACKAGE.replace("torch.neg", "torch.abs"), shared)
    assert changed[0] == one and changed[1] != two
    source._definitions.cache_clear()


@pytest.mark.parametrize("op", OPS)
def test_every_python_arm_of_ours_has_its_own_digest(op: str) -> None:
    w = any_workload(OPS[op])
    python = [c for c in registry.all_candidates(op) if c.backend in ("TORCH", "INDUCTOR")]
    made = [arms.arm(c, w, CPU, "", Knobs()) for c in python]
    assert len({a.digest for a in made}) == len(made)
    assert [a.candidate for a in made] == [c.name for c in python]
    assert all(a.build == "" for a in made)


def any_workload(op: Op) -> Workload:
    return op.workload("bf16", dict.fromkeys(op.dim_names, 8))


def test_a_native_arms_digest_covers_build_and_knobs() -> None:
    class Kernel(Candidate):
        name, op, backend = "cpp:x", "rmsnorm", "CPP"

        def supports(self, w: Workload, fp: Fingerprint) -> Accepted:
            return Accepted()

        def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> NativeRecipe:
            return NativeRecipe(source="cpu/x.cpp", entry="x", knob_args=("threads",))

    def threads(n: int) -> Knobs:
        return Knobs(settings=(Knob(name="threads", value=n, formula="n", inputs={}),))

    one = arms.arm(Kernel(), NORM, CPU, "build-a", threads(1))
    assert (one.build, one.knobs, one.backend) == ("build-a", {"threads": 1}, "CPP")
    others = [
        arms.arm(Kernel(), NORM, CPU, "build-b", threads(1)),
        arms.arm(Kernel(), NORM, CPU, "build-a", threads(2)),
    ]
    assert len({a.digest for a in (one, *others)}) == 3
    assert arms.arm(Kernel(), NORM, CPU, "build-a", threads(1)) == one


def test_a_python_arms_digest_changes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = registry.baseline("rmsnorm")
    before = arms.arm(baseline, NORM, CPU, "", Knobs()).digest
    assert arms.arm(baseline, NORM, CPU, "", Knobs()).digest == before
    identity = arms.torch_identity()
    for field in identity:
        monkeypatch.setattr(arms, "torch_identity", lambda field=field: {**identity, field: "another"})
        assert arms.arm(baseline, NORM, CPU, "", Knobs()).digest != before


# --- plug-ins --------------------------------------------------------------------------------------------------------


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def set_allowed(value: str) -> None:
        monkeypatch.setenv("AUTOSEL_ALLOW", value)
        settings.read.cache_clear()
        plugins.load_allowed.cache_clear()

    yield set_allowed
    monkeypatch.undo()
    settings.read.cache_clear()


def package(folder: Path, name: str, text: str, value: str = "", version: str = "1.2") -> None:
    """Return an installed distribution with one entry point."""
    module(folder, f"{name}_module", text)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[autosel.candidates]\n{name} = {value or f'{name}_module'}\n")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


REGISTERS = (
    "import autosel\n@autosel.candidate('rmsnorm', name='plugged')\ndef f(x, weight, eps, offset):\n    return x\n"
)


def plugin(name: str, found: tuple[plugins.Plugin, ...]) -> plugins.Plugin:
    return next(p for p in found if p.name == name)


def test_a_plugin_is_not_imported_until_it_is_allowed(folder: Path, allow: Callable[[str], None]) -> None:
    package(folder, "plugone", REGISTERS)
    allow("")
    assert plugin("plugone", plugins.load_allowed()) == plugins.Plugin(
        name="plugone", value="plugone_module", distribution="plugone", version="1.2", allowed=False
    )
    assert all(c.name != "user:plugged" for c in registry.all_candidates("rmsnorm"))
    assert "plugone_module" not in sys.modules
    allow("other, plugone")
    assert registry.find("rmsnorm", "user:plugged").backend == "USER"
    assert plugin("plugone", plugins.load_allowed()).candidates == ("user:plugged",)


def test_a_plugin_may_be_allowed_by_distribution_and_name(folder: Path, allow: Callable[[str], None]) -> None:
    package(folder, "plugtwo", REGISTERS)
    allow("elsewhere:plugtwo")
    assert not plugin("plugtwo", plugins.load_allowed()).allowed
    allow("plugtwo:plugtwo")
    assert plugin("plugtwo", plugins.load_allowed()).allowed


@pytest.mark.parametrize(
    ("text", "value", "problem"),
    [
        (TRAP, "", "RuntimeError: imported"),
        ("x = 1\n", "", "it registered no candidate"),
        ("KERNELS = (1, 2)\n", "{m}:KERNELS", "TypeError: 1 is not a Candidate"),
        ("x = 1\n", "{m}:absent", "AttributeError"),
        ("import autosel\nautosel.candidate('nonsense')\n", "", "unknown op 'nonsense'"),
        ("import sys\nsys.exit(3)\n", "", "SystemExit: 3"),
    ],
)
def test_a_broken_plugin_is_reported_and_does_not_stop_others(
    folder: Path, allow: Callable[[str], None], text: str, value: str, problem: str
) -> None:
    package(folder, "plugbad", text, value.format(m="plugbad_module"))
    allow("plugbad")
    assert plugin("plugbad", plugins.load_allowed()).problem.startswith(problem)
    assert registry.baseline("rmsnorm") in registry.all_candidates("rmsnorm")


def test_a_plugin_may_hand_over_candidates_as_a_value(folder: Path, allow: Callable[[str], None]) -> None:
    text = (
        "from autosel.candidates.user import UserCandidate\n"
        "KERNELS = [UserCandidate('rmsnorm', 'pluglist_module:f', '', name='listed')]\n"
        "def f(x, weight, eps, offset): ...\n"
    )
    package(folder, "pluglist", text, "pluglist_module:KERNELS")
    allow("pluglist")
    assert plugin("pluglist", plugins.load_allowed()).candidates == ("user:listed",)
    assert registry.find("rmsnorm", "user:listed")


def test_dtype_names_of_candidates_are_those_of_ops() -> None:
    assert set(user.EVERY_DTYPE) <= set(DTYPE)
