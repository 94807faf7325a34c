"""Replicas on more than one process: `torchrun --nproc-per-node 4 script.py`, over torch.distributed."""

from torchrex.distributed.crew import ALONE, Crew
from torchrex.distributed.joining import join, leave
from torchrex.distributed.mesh import ReplicaMesh, replica_mesh

__all__ = ["ALONE", "Crew", "ReplicaMesh", "join", "leave", "replica_mesh"]
