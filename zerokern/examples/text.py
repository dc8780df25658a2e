"""English text as bytes: what the model learns from."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


class Text:
    """A text cut into a training part and a validation part, as int64 windows of bytes.

    Args:
        content: the text. One tenth, its end, is kept for validation.
        window: bytes in a sample: the context of the model and the byte after it.

    Raises:
        ValueError: a part is shorter than one window.
    """

    def __init__(self, content: bytes, *, window: int) -> None:
        shortest = 10 * window
        if len(content) < shortest:
            raise ValueError(
                f"the text has {len(content)} bytes; at least {shortest} are needed:"
                " give a longer one"
            )
        every_byte = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        cut = len(content) * 9 // 10
        self.window = window
        self.training = every_byte[:cut]
        self.validation = every_byte[cut:]

    @classmethod
    def read(cls, path: Path | None, *, window: int) -> Text:
        """Read a file; without one, the Python language reference, which every CPython
        carries.

        Raises:
            ValueError: there is no such file, it cannot be read, or it is too short.
        """
        if path is None:
            return cls(language_reference(), window=window)
        try:
            return cls(path.read_bytes(), window=window)
        except OSError as error:
            raise ValueError(
                f"cannot read the text {path}: {error.strerror}"
            ) from error

    @property
    def context(self) -> int:
        """Bytes of a window that are predicted."""
        return self.window - 1

    def batch(
        self,
        step: int,
        *,
        size: int,
        seed: int,
    ) -> Tensor:
        """Return the global batch of a step, int64 [size, window]: random windows, the
        same on every rank."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(
            len(self.training) - self.window + 1, (size,), generator=generator
        )
        return self.training[starts[:, None] + torch.arange(self.window)].long()

    def validation_windows(self, most: int) -> Tensor:
        """Return up to `most` windows spread evenly over the validation part, int64 [n,
        window]."""
        count = min(most, len(self.validation) // self.window)
        starts = torch.linspace(0, len(self.validation) - self.window, count).long()
        return self.validation[starts[:, None] + torch.arange(self.window)].long()


def language_reference() -> bytes:
    """Return the chapters of the Python language reference that `help()` shows: some
    460 kB of plain English.

    Raises:
        ValueError: this Python was packaged without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "this Python lacks pydoc_data, the default text: name a file with --text"
            " FILE"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
