"""zerokern: optimizers that shard state, gradients or parameters over the ranks. `from
zerokern import AdamW`."""

from .amp import GradScaler
from .comm_log import Call
from .config import Buckets, Precision
from .memory import Memory
from .optimizer import SGD, Adam, AdamW, Lion
from .options import Options

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Buckets",
    "Call",
    "GradScaler",
    "Lion",
    "Memory",
    "Options",
    "Precision",
]
__version__ = "0.1.0"
