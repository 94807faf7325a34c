"""How a run looks to ArviZ: an xarray DataTree with its schema's groups, and one of our own for the
ladder.

    posterior          x (chain, draw, coordinate)                                          draws of rung 0; densities only
                       or, of one coordinate alone, its name or x (chain, draw)
    sample_stats       minibatch_energy, swapped (chain, draw), noise_variance (.., pair)   one number for every draw
    replica_exchange   energy, replica_at (chain, draw, rung), noise_variance, [correction, swaps] (chain, draw, pair),
                       accepted, proposed (chain, pair)                                     how the ladder behaved

A chain is an independent run, pair k is rungs k and k + 1, and every group has the coordinate
`step`: how many steps were done. The energy is a minibatch estimate and therefore neither `lp` nor
`energy` of the schema, which ArviZ takes for exact. All of `sample_stats` has the axes chain and
draw, so that `az.summary(..., group="sample_stats")` works: totals are not in it.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import torchrex
from torchrex.errors import InvalidArgumentError, MissingDependencyError

if TYPE_CHECKING:
    from xarray import DataTree

    from torchrex.posterior.draws import Draws

AXES = ("chain", "draw", "step")
TRACE_TENSORS = ("steps", "energy", "replica_at", "noise_variance", "accepted", "proposed")
MEANINGS = {
    "minibatch_energy": "estimate of the negative log posterior on rung 0, a sum over the data, made at the start of the step",
    "swapped": "1 if another replica than at the draw before stands on rung 0, otherwise and for the first draw 0",
    "noise_variance": "variance of one energy estimate, as the swap test of the step used it",
    "energy": "energy estimates at the start of the step, by the rung held before its swaps",
    "replica_at": "the replica on each rung after the step's swaps",
    "correction": "inverse gap * noise variance / F: what the energy difference had to exceed",
    "swaps": "swaps made after the step kept before, up to this one",
    "accepted": "swaps made over all steps of the run, burn-in included",
    "proposed": "swaps tested over all steps of the run, burn-in included",
}


def import_extra(name: str) -> Any:
    """ArviZ or xarray, or one line that says how to get it."""
    try:
        with warnings.catch_warnings():
            # Once a day ArviZ 0.23 announces version 1. `to_arviz` serves both, so there is nothing
            # to do about it.
            warnings.filterwarnings(
                "ignore", message=r"\s*ArviZ is undergoing", category=FutureWarning
            )
            return importlib.import_module(name)
    except ImportError:
        raise MissingDependencyError(
            f"this needs {name}, which is not installed: pip install 'torchrex[diagnostics]'"
        ) from None


def to_arviz(tree: DataTree) -> Any:
    """The tree as the functions of the installed ArviZ take it: itself from version 1 on, an
    InferenceData before.
    """
    arviz = import_extra("arviz")
    return (
        tree
        if int(arviz.__version__.split(".")[0]) >= 1
        else arviz.InferenceData.from_datatree(tree)
    )


def draws_to_datatree(draws: Draws, names: Sequence[str] | None = None) -> DataTree:
    """The draws of a density; `names` are those of its coordinates, numbers if not given."""
    labels = coordinate_labels(names, draws.values.shape[2])
    if names and any(label in AXES or "/" in str(label) for label in labels):
        raise InvalidArgumentError(
            f"names must hold no slash and be none of {', '.join(AXES)}, which are axes, got {names!r}"
        )
    per_draw = {  # (chain, draw, rung or pair)
        name: getattr(draws, name).permute(2, 0, 1)
        for name in ("energy", "replica_at", "noise_variance")
    }
    totals = {"accepted": draws.accepted.T, "proposed": draws.proposed.T}
    about = {"n_steps": draws.n_steps, "status": draws.status, "settings": _as_json(draws.settings)}
    if len(labels) == 1:
        # A scalar: the table of ArviZ says x, and not x[x].
        (title,) = coordinate_titles(names, 1)
        return _tree(
            {title: (("chain", "draw"), draws.values[:, :, 0])},
            {},
            per_draw,
            totals,
            draws.steps,
            about,
        )
    posterior = {"x": (("chain", "draw", "coordinate"), draws.values)}
    # Names as objects: zarr 3 has no settled format for numpy's text of fixed length, and warns.
    coordinate = np.array(labels, dtype=object if names else int)
    return _tree(posterior, {"coordinate": coordinate}, per_draw, totals, draws.steps, about)


def trace_to_datatree(
    traces: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    *,
    burn_in: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> DataTree:
    """What `Trace.tensors()` or the trace.safetensors of a network's run holds; several runs become
    the chains.

    There are no posterior values: name the group, as in `az.summary(to_arviz(tree),
    group="sample_stats")`. Kept steps up to `burn_in` are left out; `settings` is whatever
    describes the runs and goes into the attributes.
    """
    traces = [traces] if isinstance(traces, Mapping) else list(traces)
    if isinstance(burn_in, bool) or not isinstance(burn_in, int) or burn_in < 0:
        raise InvalidArgumentError(f"burn_in must be a whole number >= 0, got {burn_in!r}")
    if not traces:
        raise InvalidArgumentError(
            "there is no trace to export; give the tensors of at least one run"
        )
    for chain, trace in enumerate(traces):
        missing = [name for name in TRACE_TENSORS if name not in trace]
        if missing:
            raise InvalidArgumentError(
                f"trace {chain} has no {', '.join(missing)}; give what Trace.tensors() returns after at least one step"
            )
        if (
            not torch.equal(trace["steps"], traces[0]["steps"])
            or trace["energy"].shape != traces[0]["energy"].shape
        ):
            raise InvalidArgumentError(
                f"chains must keep the same steps on as many rungs, but trace 0 has {_extent(traces[0])} and trace {chain} "
                f"{_extent(trace)}; export them one by one"
            )
    steps = (
        traces[0]["steps"] + 1
    )  # a trace numbers steps from 0, draws and `step` count how many were done
    kept = steps > burn_in
    if not kept.any():
        raise InvalidArgumentError(
            f"burn_in={burn_in} leaves no step of {_extent(traces[0])}; lower it"
        )
    names = [
        name
        for name in ("energy", "replica_at", "noise_variance", "correction")
        if all(name in t for t in traces)
    ]
    per_draw = {name: torch.stack([trace[name] for trace in traces])[:, kept] for name in names}
    if all("swap_steps" in trace for trace in traces):
        per_draw["swaps"] = torch.stack([_swaps_between(trace) for trace in traces])[:, kept]
    totals = {
        name: torch.stack([trace[name] for trace in traces]) for name in ("accepted", "proposed")
    }
    return _tree(None, {}, per_draw, totals, steps[kept], {"settings": _as_json(settings or {})})


def coordinate_labels(names: Sequence[str] | None, dim: int) -> list[str] | list[int]:
    """What the coordinates are called, checked; their numbers if they have no names."""
    if names is None:
        return list(range(dim))
    labels = [names] if isinstance(names, str) else list(names)
    if (
        not all(isinstance(name, str) for name in labels)
        or len(labels) != dim
        or len(set(labels)) != dim
    ):
        raise InvalidArgumentError(
            f"names must be {dim} different strings, one for each coordinate, got {names!r}"
        )
    return labels


def coordinate_titles(names: Sequence[str] | None, dim: int) -> list[str]:
    """The coordinates as tables and pictures call them: x[a], x[b]; one alone is called by its
    name, or x.
    """
    labels = coordinate_labels(names, dim)
    if dim == 1:
        return ["x" if names is None else str(labels[0])]
    return [f"x[{label}]" for label in labels]


def _tree(
    posterior: dict[str, Any] | None,
    posterior_coords: dict[str, Any],
    per_draw: dict[str, Tensor],
    totals: dict[str, Tensor],
    steps: Tensor,
    about: dict[str, Any],
) -> DataTree:
    xarray = import_extra("xarray")
    n_chains, n_draws, n_rungs = per_draw["energy"].shape
    n_pairs = totals["accepted"].shape[1]
    about = {**_library(), **about}
    axes = {
        "chain": list(range(n_chains)),
        "draw": list(range(n_draws)),
        "step": ("draw", _numpy(steps)),
    }
    pairs = {"pair": list(range(n_pairs))} if n_pairs else {}

    def dataset(
        variables: dict[str, tuple[tuple[str, ...], Tensor]], coords: dict[str, Any]
    ) -> Any:
        # One rung has no pairs, and ArviZ stumbles over an empty axis.
        data = {
            name: (
                dims,
                _numpy(values),
                {"description": MEANINGS[name]} if name in MEANINGS else {},
            )
            for name, (dims, values) in variables.items()
            if "pair" not in dims or n_pairs
        }
        return xarray.Dataset(data, {**axes, **coords}, about)

    replica = per_draw["replica_at"][:, :, 0]
    swapped = torch.zeros_like(
        replica, dtype=torch.int8
    )  # not bool: az.summary of version 1 takes differences
    swapped[:, 1:] = replica[:, 1:] != replica[:, :-1]
    by_pair = ("chain", "draw", "pair")
    groups = {} if posterior is None else {"posterior": dataset(posterior, posterior_coords)}
    groups["sample_stats"] = dataset(
        {
            "minibatch_energy": (("chain", "draw"), per_draw["energy"][:, :, 0]),
            **({"swapped": (("chain", "draw"), swapped)} if n_pairs else {}),
            "noise_variance": (by_pair, per_draw["noise_variance"]),
        },
        pairs,
    )
    ladder = {
        name: (("chain", "draw", "rung") if name in ("energy", "replica_at") else by_pair, values)
        for name, values in per_draw.items()
    }
    groups["replica_exchange"] = dataset(
        {**ladder, **{name: (("chain", "pair"), values) for name, values in totals.items()}},
        {"rung": list(range(n_rungs)), **pairs},
    )
    tree: DataTree = xarray.DataTree.from_dict({"/": xarray.Dataset(attrs=about), **groups})
    return tree


def _library() -> dict[str, str]:
    """The attributes that the schema asks for."""
    version = torchrex.__version__
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "creation_library": "torchrex",
        "creation_library_version": version,
        "creation_library_language": "Python",
        "inference_library": "torchrex",
        "inference_library_version": version,
    }


def _as_json(settings: Mapping[str, Any]) -> str:
    """Attributes of netCDF are numbers and text; nothing else of the settings needs to be computed
    with.
    """
    return json.dumps(dict(settings), default=str)


def _numpy(values: Tensor) -> Any:
    values = values.detach().cpu()
    halves = (torch.bfloat16, torch.float16)  # neither numpy nor netCDF knows both
    return (values.float() if values.dtype in halves else values).numpy()


def _swaps_between(trace: Mapping[str, Tensor]) -> Tensor:
    """How many swaps of each pair were made after the kept step before, up to each kept step:
    (draws, pairs).
    """
    steps, n_pairs = trace["steps"], trace["noise_variance"].shape[1]
    kept = torch.searchsorted(steps, trace["swap_steps"])  # the first kept step not before the swap
    inside = kept < len(steps)  # swaps after the last kept step belong to none
    counts = torch.zeros(len(steps), n_pairs, dtype=torch.int64)
    one = torch.ones(int(inside.sum()), dtype=torch.int64)
    return counts.index_put_((kept[inside], trace["swap_pairs"][inside]), one, accumulate=True)


def _extent(trace: Mapping[str, Tensor]) -> str:
    steps = trace["steps"]
    span = f", {int(steps[0]) + 1} to {int(steps[-1]) + 1}," if len(steps) else ""
    return f"{len(steps)} kept steps{span} on {trace['energy'].shape[1]} rungs"
