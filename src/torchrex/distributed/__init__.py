"""Replicas on several processes: `torchrun --nproc-per-node 4 script.py`."""

from torchrex.distributed.mesh import ReplicaMesh, replica_mesh
from torchrex.distributed.process_group import (
    ALONE,
    ProcessGroup,
    Rendezvous,
    is_main_process,
    join,
    leave,
)

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
