"""zerokern: optimizers that shard state, gradients or parameters over the ranks. `from
zerokern import AdamW`."""

from .amp import GradScaler
from .buffers import Memory
from .comm import Call
from .config import Buckets, Precision
from .optimizer import SGD, Adam, AdamW, Lion

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Buckets",
    "Call",
    "GradScaler",
    "Lion",
    "Memory",
    "Precision",
]
__version__ = "0.1.0"
