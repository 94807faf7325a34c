"""Replicas on more than one process: `torchrun --nproc-per-node 4 script.py`, over
torch.distributed.
"""

from torchrex.distributed.joining import is_main_process, join, leave
from torchrex.distributed.mesh import ReplicaMesh, replica_mesh
from torchrex.distributed.process_group import ALONE, ProcessGroup
from torchrex.distributed.rendezvous import Rendezvous

__all__ = [
    "ALONE",
    "ProcessGroup",
    "Rendezvous",
    "ReplicaMesh",
    "is_main_process",
    "join",
    "leave",
    "replica_mesh",
]
