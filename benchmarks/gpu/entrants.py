"""List the candidates of each workload and prepare them for calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autosel.candidates.base import Candidate
from autosel.values import Accepted, DTypeName, Fingerprint, Knobs, NativeRecipe, Rejected, Scalar, Workload
from benchmarks.gpu.scope import Scope, is_ours
from benchmarks.gpu.variants import feature_of, variants

if TYPE_CHECKING:
    from autosel.race.contest import Entrant
    from autosel.tuning.builds import Builds


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEntry:
    """One build of a candidate, with the first workload of the scope that it serves.

    `refused` holds the reason without such a workload.
    """

    candidate: Candidate
    workload: Workload
    refused: str = ""
    further: bool = False  # not the candidate's first build

    @property
    def name(self) -> str:
        """Return op, candidate and dtype; for further builds also the shape."""
        op, dims, rest = self.workload.key.split("/", 2)
        traits = rest.partition(".")[2]
        shape = f" {dims}{'.' if traits else ''}{traits}" if self.further else ""
        return f"{op} {self.candidate.name} {self.workload.dtype}{shape}"


def entries(scope: Scope, fp: Fingerprint) -> list[BuildEntry]:
    """Return every build of every candidate of every op of the scope, in each dtype.

    The first build of each candidate comes first, so that a run that is cut short has covered all candidates. Features
    beyond the model's own workloads (windows, softcaps, ...) are covered once, in the first dtype: the other dtypes
    run the same code.
    """
    found = [entry for dtype in scope.dtypes for entry in _in_dtype(scope, fp, dtype, varied=dtype == scope.dtypes[0])]
    return sorted(found, key=lambda e: e.further)


def entry_named(name: str, scope: Scope, fp: Fingerprint) -> BuildEntry:
    return next(e for e in entries_of(name, scope, fp) if e.name == name)


def entries_of(name: str, scope: Scope, fp: Fingerprint) -> list[BuildEntry]:
    """Return the entries of the op, candidate and dtype in `name`. Listing the other ops would take seconds."""
    op, candidate, dtype = name.split(" ")[:3]
    first = dtype == scope.dtypes[0]
    listed = _in_dtype(replace(scope, ops=(op,)), fp, dtype, varied=first)  # type: ignore[arg-type]
    return [entry for entry in listed if entry.candidate.name == candidate]


def _in_dtype(scope: Scope, fp: Fingerprint, dtype: DTypeName, *, varied: bool) -> Iterator[BuildEntry]:
    from autosel.candidates.registry import eligible

    own = [named.workload for named in scope.everything(dtype=dtype)]
    features = variants(scope, dtype) if varied else ()
    for op in dict.fromkeys(w.op for w in own):
        workloads, others = ([w for w in listed if w.op == op] for listed in (own, features))
        asked = {w.key: eligible(w, fp, scope.effort) for w in (*workloads, *others)}
        for i, (candidate, first) in enumerate(asked[workloads[0].key]):
            accepted = {key for key, found in asked.items() if isinstance(found[i][1], Accepted)}
            taken, further = ([w for w in some if w.key in accepted] for some in (workloads, others))
            builds = _builds(candidate, taken, further, fp)
            for number, w in enumerate(builds):
                yield BuildEntry(candidate=candidate, workload=w, further=number > 0)
            if not builds:
                why = first.reason if isinstance(first, Rejected) else ""
                yield BuildEntry(candidate=candidate, workload=workloads[0], refused=why)


def _builds(
    candidate: Candidate, workloads: Sequence[Workload], varied: Sequence[Workload], fp: Fingerprint
) -> list[Workload]:
    """Return the first workload of each build, then the first with each feature that none of these has."""
    builds: dict[object, Workload] = {}
    for w in workloads:
        builds.setdefault(_build(candidate, w, fp), w)
    features = {feature_of(w): w for w in builds.values()}
    for w in varied:
        if features.setdefault(feature_of(w), w) is w:
            builds[w.key] = w
    return list(builds.values())


def _build(candidate: Candidate, w: Workload, fp: Fingerprint) -> object:
    """Return a value that is equal for workloads that share a build and a code path.

    The build is given by a native kernel's flags, or by a Triton kernel's knobs, which are all compiled in; other
    candidates are not built for a shape. The code path is given by the traits: Triton compiles them in, and the others
    branch on them.
    """
    if not is_ours(candidate.name):
        return w.traits
    knobs = candidate.knobs(w, fp)
    recipe = candidate.recipe(w, fp, knobs)
    return (recipe.flags if isinstance(recipe, NativeRecipe) else tuple(knobs.values.items())), w.traits


def entrant(
    candidate: Candidate,
    w: Workload,
    fp: Fingerprint,
    knobs: Mapping[str, Scalar] | None = None,
    builds: Builds | None = None,
) -> Entrant:
    """Compile the candidate and return it as the race's instrument needs it. Raises BuildError.

    `knobs` override values of the closed form; `builds` is the pool that compiles it in parallel with others.
    """
    from autosel.native.compile import compile_source
    from autosel.tuning.contend import entrant_of
    from autosel.tuning.shortlist import way_of

    way = way_of(candidate, w, fp, with_values(candidate.knobs(w, fp), knobs or {}))
    if isinstance(way.recipe, NativeRecipe):
        built = builds.wait(way.recipe) if builds else compile_source(way.recipe.source, way.recipe.flags)
        assert built is not None  # these builds have no time limit
    return entrant_of(way)


def with_values(knobs: Knobs, values: Mapping[str, Scalar]) -> Knobs:
    unknown = set(values) - set(knobs.values)
    assert not unknown, f"no knobs {sorted(unknown)}"
    return Knobs(settings=tuple(replace(k, value=values.get(k.name, k.value)) for k in knobs.settings))
