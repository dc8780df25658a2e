"""torch.func inside of a forward: `grad`, `jvp`, `vmap` and the like.

Under a transform, tensors are wrapped, and a wrapped parameter is read wherever its
parameter is, not where autograd has saved it. So a unit that is gathered there stays
whole until the transform is over and the iteration goes on.
"""

from __future__ import annotations

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

innermost = torch._C._functorch.peek_interpreter_stack
"""Return the transform that is under way, or None."""

outside = temporarily_clear_interpreter_stack
"""A context in which tensors are made that outlive the transforms under way."""
