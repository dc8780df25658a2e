"""zerokern: AdamW whose state, gradients or parameters are sharded over the ranks. `from zerokern import AdamW`."""

from .buffers import Memory
from .comm import Call
from .config import Buckets, Precision
from .optimizer import Adam, AdamW

__all__ = ["Adam", "AdamW", "Buckets", "Call", "Memory", "Precision"]
__version__ = "0.1.0"
