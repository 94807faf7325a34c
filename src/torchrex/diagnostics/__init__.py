"""Numbers from draws and run folders."""

from torchrex.diagnostics.acceptance import (
    CorrectionSize,
    acceptance_from_energies,
    correction_against_spread,
    factor_for_acceptance,
    observed_acceptance,
)
from torchrex.diagnostics.convergence import AT_ONE_POINT, FEWEST_DRAWS, Convergence, convergence
from torchrex.diagnostics.disagreement import Disagreement, replica_disagreement
from torchrex.diagnostics.distance import (
    MixtureQuantiles,
    distance_curve,
    mean_and_error,
    wasserstein,
)
from torchrex.diagnostics.estimate import Estimate, batch_means, mean_of, over_chains
from torchrex.diagnostics.history import History, Swaps, temperatures_at
from torchrex.diagnostics.noise_level import (
    allowed_acceptance,
    effective_noise,
    factor_for_noise,
    ladder_for_noise,
    noise_level,
    rungs_for_noise,
)
from torchrex.diagnostics.tails import Tail, hill
from torchrex.diagnostics.temperature import (
    equipartition_temperature,
    hypervirial_temperature,
    kinetic_temperature,
)
from torchrex.diagnostics.transport import (
    assigned_w2,
    line_distance,
    same_law_distance,
    sliced_w2,
    transported,
)
from torchrex.diagnostics.travel import (
    Occupancy,
    Travel,
    even_odd_rate,
    optimal_rate,
    round_trips,
    rung_occupancy,
)

__all__ = [
    "AT_ONE_POINT",
    "FEWEST_DRAWS",
    "Convergence",
    "CorrectionSize",
    "Disagreement",
    "Estimate",
    "History",
    "MixtureQuantiles",
    "Occupancy",
    "Swaps",
    "Tail",
    "Travel",
    "acceptance_from_energies",
    "allowed_acceptance",
    "assigned_w2",
    "batch_means",
    "convergence",
    "correction_against_spread",
    "distance_curve",
    "effective_noise",
    "equipartition_temperature",
    "even_odd_rate",
    "factor_for_acceptance",
    "factor_for_noise",
    "hill",
    "hypervirial_temperature",
    "kinetic_temperature",
    "ladder_for_noise",
    "line_distance",
    "mean_and_error",
    "mean_of",
    "noise_level",
    "observed_acceptance",
    "optimal_rate",
    "over_chains",
    "replica_disagreement",
    "round_trips",
    "rung_occupancy",
    "rungs_for_noise",
    "same_law_distance",
    "sliced_w2",
    "temperatures_at",
    "transported",
    "wasserstein",
]
