"""flashinfer-python's decode attention over pages: one planned on the host, and XQA, which needs no plan.

Signatures: 0.7.2.post1; those used of the planned one are the same in 0.3.0, XQA's in 0.5.0.

`BatchDecodeWithPagedKVCacheWrapper` divides its work by the lengths, on the host: `plan` must run again whenever a
length changes, and reading lengths waits for the device. So each call reads them and plans only after a change; the
pages are gathered on the device each time. Such a call cannot be captured in a graph, so a race of graphs leaves it
out. `xqa` reads lengths and pages on the device. Both need a key in every sequence: an empty one gets one, and its
result is set to zero.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from autosel.candidates.libraries.base import LibraryKernel, aligned
from autosel.candidates.libraries.flashinfer import FLASHINFER, GROUP_FOR_TENSOR_CORES, HEAD_DIMS
from autosel.values import Workload

if TYPE_CHECKING:
    from torch import Tensor

PLANNED = replace(FLASHINFER, needs=("BatchDecodeWithPagedKVCacheWrapper",))
XQA = replace(FLASHINFER, least_version=(0, 5, 0), least_cc=(9, 0), needs=("xqa",))
XQA_PAGES = (16, 32, 64, 128)
XQA_MAJORS = (9, 10, 12)
WORKSPACE_BYTES = 128 << 20  # recommended by its documentation
SEMAPHORES = 2 << 20  # 8 MiB, as its own caller allocates
MOST_PLANS = 8  # each uses 8 MiB on the device and 8 MiB of pinned memory
CORES_GROUPS = (1, 2, 3)  # query heads per KV head of its kernel without tensor cores, below the groups that use them


# --- planned ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Plan:
    """A wrapper, and the lengths of its plan."""

    wrapper: Any
    lengths: list[int] | None = None
    places: tuple[Tensor, Tensor] | None = None  # row and column of the block table for each used page
    pages: Tensor | None = None  # the wrapper's list of pages, which it reads in place
    empty: Tensor | None = None  # bool [B,1,1,1]: sequences without keys


_PLANS: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
_ONE_AT_A_TIME = threading.Lock()  # each call writes and reads a plan and its list of pages


def planned(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    max_len: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Call the planned attention of q[B,Hq,1,D] over [P,page,Hkv,D] ("NHD")."""
    import torch

    keys, values = _alike(k_pages, v_pages)
    settings = {
        "window_left": window - 1 if window else -1,
        "logits_soft_cap": softcap or None,
        "sm_scale": scale or None,
    }
    wanted = lengths.tolist()
    with _ONE_AT_A_TIME:
        plan = _plan(q, keys, tuple(settings.values()))
        if plan.lengths != wanted:
            _renew(plan, q, keys, wanted, settings)
        assert plan.places is not None and plan.pages is not None
        # An empty sequence's entry may have any value; its result is masked below.
        torch.clamp(block_table[plan.places], min=0, max=len(keys) - 1, out=plan.pages)
        made: Tensor = plan.wrapper.run(aligned(q[:, :, 0]).contiguous(), (keys, values))[:, :, None]
        return made if plan.empty is None else made.masked_fill_(plan.empty, 0.0)


def _plan(q: Tensor, keys: Tensor, settings: tuple[Any, ...]) -> Plan:
    """Return the plan for these shapes and settings on this stream, which owns its workspace."""
    stream = _stream(q)
    key = (stream, str(q.device), q.dtype, *q.shape[:2], *keys.shape[1:], *settings)
    found = _PLANS.pop(key, None) or Plan(wrapper=_wrapper(q, keys, stream))
    _PLANS[key] = found
    if len(_PLANS) > MOST_PLANS:
        _PLANS.popitem(last=False)
    return found


def _wrapper(q: Tensor, keys: Tensor, stream: int) -> Any:
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    group = q.shape[1] // keys.shape[2]
    cores = group >= GROUP_FOR_TENSOR_CORES or group not in CORES_GROUPS
    workspace = _workspace(str(q.device), stream)
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=cores)


def _renew(plan: Plan, q: Tensor, keys: Tensor, wanted: list[int], settings: dict[str, Any]) -> None:
    import torch

    page, device = keys.shape[1], q.device
    used = torch.tensor([max(n, 1) for n in wanted], dtype=torch.int32)
    counts = (used + page - 1) // page
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()))
    rows = torch.repeat_interleave(torch.arange(len(wanted)), counts)
    columns = torch.arange(len(rows)) - starts[:-1].long()[rows]
    plan.lengths, plan.places = None, (rows.to(device), columns.to(device))
    plan.pages = torch.zeros(len(rows), dtype=torch.int32, device=device)
    plan.empty = torch.tensor([n == 0 for n in wanted], device=device)[:, None, None, None] if 0 in wanted else None
    plan.wrapper.plan(
        starts.to(device),
        plan.pages,
        (used - (counts - 1) * page).to(device),
        q.shape[1],
        keys.shape[2],
        q.shape[-1],
        page,
        q_data_type=q.dtype,
        kv_data_type=keys.dtype,
        **settings,
    )
    plan.lengths = wanted


# --- XQA --------------------------------------------------------------------------------------------------------------


def xqa(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    max_len: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Call XQA. It divides by the root of D, so its scale is relative. Its window includes the query's position."""
    import flashinfer  # type: ignore[import-not-found,unused-ignore]
    import torch

    assert not softcap, "it has no softcap"
    keys, values = _alike(k_pages, v_pages)
    (b, heads, _, d), stream = q.shape, _stream(q)
    out = q.new_empty(b, 1, heads, d)
    flashinfer.xqa(
        aligned(q[:, :, 0]).contiguous()[:, None],
        keys,
        values,
        block_table.clamp(0, len(keys) - 1),  # entries beyond a length may have any value, and an empty row reads one
        lengths.clamp_min(1).view(torch.uint32)[:, None],
        out,
        _workspace(str(q.device), stream),
        _semaphores(str(q.device), stream),
        keys.shape[2],
        keys.shape[1],
        q_scale=scale * d**0.5 if scale else 1.0,
        sliding_win_size=window,
    )
    return out.transpose(1, 2).masked_fill_((lengths == 0)[:, None, None, None], 0.0)


# --- both -------------------------------------------------------------------------------------------------------------


def _alike(k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return both aligned and with equal strides: the library addresses both by the strides of K."""
    keys, values = aligned(k_pages), aligned(v_pages)
    return (keys, values) if keys.stride() == values.stride() else (keys.contiguous(), values.contiguous())


def _stream(t: Tensor) -> int:
    import torch

    return int(torch.cuda.current_stream(t.device).cuda_stream) if t.is_cuda else 0


@lru_cache(maxsize=8)
def _workspace(device: str, stream: int) -> Tensor:
    """Return zeros, as the first use needs. A call leaves nothing that the next one on the stream must keep."""
    import torch

    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@lru_cache(maxsize=8)
def _semaphores(device: str, stream: int) -> Tensor:
    """Return zeros; each call leaves them zero."""
    import torch

    return torch.zeros(SEMAPHORES, dtype=torch.uint32, device=device)


def _no_plan(w: Workload, _: tuple[int, int]) -> str:
    if w["S"] != 1:
        return f"supports one position per call; the workload has S = {w['S']}"
    return "" if w["D"] in HEAD_DIMS else f"supports heads of {', '.join(map(str, HEAD_DIMS))}; here {w['D']} wide"


def _no_xqa(w: Workload, cc: tuple[int, int]) -> str:
    if cc[0] not in XQA_MAJORS:
        return f"is for compute capabilities {', '.join(f'{m}.x' for m in XQA_MAJORS)}; the device has {cc[0]}.{cc[1]}"
    if w["page"] not in XQA_PAGES:
        return f"supports pages of {', '.join(map(str, XQA_PAGES))} tokens; these have {w['page']}"
    return "it has no softcap" if w.trait("softcap", 0.0) else _no_plan(w, cc)


KERNELS = (
    LibraryKernel(
        "paged_attn", "flashinfer_paged:planned", PLANNED, backend="FLASHINFER", limits=_no_plan, writes_out=False
    ),
    LibraryKernel("paged_attn", "flashinfer_paged:xqa", XQA, backend="FLASHINFER", limits=_no_xqa, writes_out=False),
)
