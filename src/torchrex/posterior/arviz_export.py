"""Runs for ArviZ: an xarray DataTree with the groups of its schema, and one more for the ladder.

    posterior          x (chain, draw, coordinate): draws of rung 0; densities only.
                       A single coordinate is (chain, draw), under its own name or x
    sample_stats       minibatch_energy, swapped (chain, draw), noise_variance (.., pair)
    replica_exchange   energy, replica_at (chain, draw, rung), accepted, proposed (chain, pair),
                       noise_variance and, of traces, correction and swaps (chain, draw, pair)

A chain is an independent run, pair k is rungs k and k + 1, and every group has the coordinate
`step`: how many steps were done. The energy is a minibatch estimate and therefore neither `lp` nor
`energy` of the schema, which ArviZ takes for exact. All of `sample_stats` has the axes chain and
draw, so that `az.summary(..., group="sample_stats")` works: totals are not in it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import torchrex
from torchrex.errors import InvalidArgumentError, import_extra, require_whole

if TYPE_CHECKING:
    from xarray import DataTree

    from torchrex.posterior.draws import Draws

AXES = ("chain", "draw", "step")
TRACE_TENSORS = ("steps", "energy", "replica_at", "noise_variance", "accepted", "proposed")
BY_RUNG = ("energy", "replica_at")
MEANINGS = {
    "minibatch_energy": "estimate of the negative log posterior on rung 0, a sum over the data, "
    "made at the start of the step",
    "swapped": "1 if the replica on rung 0 is another one than at the draw before, else 0",
    "noise_variance": "variance of one energy estimate, as the swap test of the step used it",
    "energy": "energy estimates at the start of the step, by the rung held before its swaps",
    "replica_at": "the replica on each rung after the step's swaps",
    "correction": "inverse gap * noise variance / F: what the energy difference had to exceed",
    "swaps": "swaps made after the step kept before, up to this one",
    "accepted": "swaps made over all steps of the run, burn-in included",
    "proposed": "swaps tested over all steps of the run, burn-in included",
}


def import_arviz() -> Any:
    with warnings.catch_warnings():
        # ArviZ 0.23 announces version 1 once a day; `to_arviz` serves both.
        warnings.filterwarnings("ignore", message=r"\s*ArviZ is undergoing", category=FutureWarning)
        return import_extra("arviz", "diagnostics")


def to_arviz(tree: DataTree) -> Any:
    """The tree for the installed ArviZ: itself from version 1 on, an InferenceData before."""
    arviz = import_arviz()
    is_new = int(arviz.__version__.split(".")[0]) >= 1
    return tree if is_new else arviz.InferenceData.from_datatree(tree)


def draws_to_datatree(draws: Draws, names: Sequence[str] | None = None) -> DataTree:
    """The draws of a density; `names` are those of its coordinates, numbers if not given."""
    labels = coordinate_labels(names, draws.values.shape[2])
    if names and any(label in AXES or "/" in str(label) for label in labels):
        raise InvalidArgumentError(
            f"names must hold no slash and not be {', '.join(AXES)}, which are axes, got {names!r}"
        )
    posterior: dict[str, Any]
    coords: dict[str, Any] = {}
    if len(labels) == 1:  # a scalar: the table of ArviZ says x and not x[x]
        (title,) = coordinate_titles(names, 1)
        posterior = {title: (("chain", "draw"), draws.values[:, :, 0])}
    else:
        posterior = {"x": (("chain", "draw", "coordinate"), draws.values)}
        # Names as objects: zarr 3 has no settled format for numpy's text of fixed length.
        coords = {"coordinate": np.array(labels, dtype=object if names else int)}
    per_draw = {
        name: getattr(draws, name).permute(2, 0, 1) for name in (*BY_RUNG, "noise_variance")
    }
    totals = {"accepted": draws.accepted.T, "proposed": draws.proposed.T}
    about = {"n_steps": draws.n_steps, "status": draws.status, "settings": _json(draws.settings)}
    return _tree(posterior, coords, per_draw, totals, draws.steps, about)


def trace_to_datatree(
    traces: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    *,
    burn_in: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> DataTree:
    """The tensors of `Trace.tensors()` or of a run's trace.safetensors; several runs become chains.

    There are no posterior values: name the group, as in `az.summary(to_arviz(tree),
    group="sample_stats")`. Kept steps up to `burn_in` are left out; `settings` describes the runs
    and goes into the attributes.
    """
    traces = [traces] if isinstance(traces, Mapping) else list(traces)
    require_whole("burn_in", burn_in)
    if not traces:
        raise InvalidArgumentError("there is no trace to export; give those of one run or more")
    for chain, trace in enumerate(traces):
        if missing := [name for name in TRACE_TENSORS if name not in trace]:
            raise InvalidArgumentError(
                f"trace {chain} has no {', '.join(missing)}; give Trace.tensors() of a run "
                "that has made steps"
            )
        same_steps = torch.equal(trace["steps"], traces[0]["steps"])
        if not same_steps or trace["energy"].shape != traces[0]["energy"].shape:
            raise InvalidArgumentError(
                f"chains must keep the same steps on as many rungs, but trace 0 has "
                f"{_extent(traces[0])} and trace {chain} {_extent(trace)}; export them one by one"
            )
    steps = traces[0]["steps"] + 1  # a trace numbers steps from 0; draws count the steps done
    kept = steps > burn_in
    if not kept.any():
        raise InvalidArgumentError(f"burn_in={burn_in} leaves none of {_extent(traces[0])}")

    def stacked(name: str) -> Tensor:
        return torch.stack([trace[name] for trace in traces])

    names = [n for n in (*BY_RUNG, "noise_variance", "correction") if all(n in t for t in traces)]
    per_draw = {name: stacked(name)[:, kept] for name in names}
    if all("swap_steps" in trace for trace in traces):
        per_draw["swaps"] = torch.stack([_swaps_between(trace) for trace in traces])[:, kept]
    totals = {name: stacked(name) for name in ("accepted", "proposed")}
    return _tree({}, {}, per_draw, totals, steps[kept], {"settings": _json(settings or {})})


def coordinate_labels(names: Sequence[str] | None, dim: int) -> list[str] | list[int]:
    """The names of the coordinates, checked; their numbers if they have no names."""
    if names is None:
        return list(range(dim))
    labels = [names] if isinstance(names, str) else list(names)
    if (
        not all(isinstance(name, str) for name in labels)
        or not len(labels) == len(set(labels)) == dim
    ):
        raise InvalidArgumentError(f"names must be {dim} different strings, got {names!r}")
    return labels


def coordinate_titles(names: Sequence[str] | None, dim: int) -> list[str]:
    """The coordinates in tables and plots: x[a], x[b]; a single one has its own name, or x."""
    labels = coordinate_labels(names, dim)
    if dim == 1:
        return ["x" if names is None else str(labels[0])]
    return [f"x[{label}]" for label in labels]


def _tree(
    posterior: dict[str, Any],
    posterior_coords: dict[str, Any],
    per_draw: dict[str, Tensor],  # (chain, draw, rung or pair)
    totals: dict[str, Tensor],  # (chain, pair)
    steps: Tensor,
    about: dict[str, Any],
) -> DataTree:
    xarray = import_extra("xarray", "diagnostics")
    n_chains, n_draws, n_rungs = per_draw["energy"].shape
    n_pairs = n_rungs - 1
    library = {"library": "torchrex", "library_version": torchrex.__version__}
    about = {  # the schema asks for the first of these
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{f"creation_{name}": value for name, value in library.items()},
        "creation_library_language": "Python",
        **{f"inference_{name}": value for name, value in library.items()},
        **about,
    }
    axes = {"chain": list(range(n_chains)), "draw": list(range(n_draws))}
    pairs = {"pair": list(range(n_pairs))} if n_pairs else {}
    by_draw, by_pair = ("chain", "draw"), ("chain", "draw", "pair")

    def dataset(variables: dict[str, Any], coords: dict[str, Any]) -> Any:
        data = {}
        for name, (dims, values) in variables.items():
            if "pair" not in dims or n_pairs:  # ArviZ fails on an empty axis
                meaning = {"description": MEANINGS[name]} if name in MEANINGS else {}
                data[name] = (dims, _numpy(values), meaning)
        return xarray.Dataset(data, {**axes, "step": ("draw", _numpy(steps)), **coords}, about)

    replica = per_draw["replica_at"][:, :, 0]
    swapped = torch.zeros_like(replica, dtype=torch.int8)  # az.summary cannot subtract bools
    swapped[:, 1:] = replica[:, 1:] != replica[:, :-1]
    stats = {"minibatch_energy": (by_draw, per_draw["energy"][:, :, 0])}
    if n_pairs:
        stats["swapped"] = (by_draw, swapped)
    ladder: dict[str, Any] = {
        name: (("chain", "draw", "rung") if name in BY_RUNG else by_pair, values)
        for name, values in per_draw.items()
    }
    stats["noise_variance"] = ladder["noise_variance"]
    ladder |= {name: (("chain", "pair"), values) for name, values in totals.items()}
    groups = {"posterior": dataset(posterior, posterior_coords)} if posterior else {}
    groups["sample_stats"] = dataset(stats, pairs)
    groups["replica_exchange"] = dataset(ladder, {"rung": list(range(n_rungs)), **pairs})
    tree: DataTree = xarray.DataTree.from_dict({"/": xarray.Dataset(attrs=about), **groups})
    return tree


def _json(settings: Mapping[str, Any]) -> str:
    """Attributes of netCDF are numbers and text, so the settings become text."""
    return json.dumps(dict(settings), default=str)


def _numpy(values: Tensor) -> Any:
    values = values.detach().cpu()
    halves = (torch.bfloat16, torch.float16)  # numpy lacks the first, netCDF the second
    return (values.float() if values.dtype in halves else values).numpy()


def _swaps_between(trace: Mapping[str, Tensor]) -> Tensor:
    """Swaps of each pair after the kept step before, up to each kept step: (draws, pairs)."""
    steps, n_pairs = trace["steps"], trace["noise_variance"].shape[1]
    row = torch.searchsorted(steps, trace["swap_steps"])  # the first kept step not before the swap
    inside = row < len(steps)  # swaps after the last kept step belong to none
    counts = torch.zeros(len(steps), n_pairs, dtype=torch.int64)
    one = torch.ones(int(inside.sum()), dtype=torch.int64)
    return counts.index_put_((row[inside], trace["swap_pairs"][inside]), one, accumulate=True)


def _extent(trace: Mapping[str, Tensor]) -> str:
    steps = trace["steps"]
    span = f", {int(steps[0]) + 1} to {int(steps[-1]) + 1}," if len(steps) else ""
    return f"{len(steps)} kept steps{span} on {trace['energy'].shape[1]} rungs"
