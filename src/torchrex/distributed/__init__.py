"""Replicas on more than one process: `torchrun --nproc-per-node 4 script.py`, over
torch.distributed.
"""

from torchrex.distributed.crew import ALONE, Crew
from torchrex.distributed.joining import is_first, join, leave
from torchrex.distributed.mesh import ReplicaMesh, replica_mesh
from torchrex.distributed.rendezvous import Rendezvous

__all__ = [
    "ALONE",
    "Crew",
    "Rendezvous",
    "ReplicaMesh",
    "is_first",
    "join",
    "leave",
    "replica_mesh",
]
