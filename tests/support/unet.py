"""A U-Net that predicts the noise of an image."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """Two convolutions; the time is added between them."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(times, outputs)
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs:
            self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class DownBlock(nn.Module):
    """A residual block, then half the size; returns what the way up will need, too."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.residual = ResidualBlock(inputs, outputs, times)
        self.shrink = nn.Conv2d(outputs, outputs, 3, stride=2, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        x = self.residual(x, time)
        return self.shrink(x), x


class UpBlock(nn.Module):
    """Twice the size, then a residual block over it and the way down's."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.grow = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.residual = ResidualBlock(2 * outputs, outputs, times)

    def forward(self, x: Tensor, time: Tensor, *, skip: Tensor) -> Tensor:
        x = self.grow(F.interpolate(x, scale_factor=2.0))
        return self.residual(torch.cat([x, skip], dim=1), time)


class UNet(nn.Module):
    """It has no ModuleList: what is gathered as one is said by type."""

    def __init__(self, channels: int = 8, times: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(
            nn.Linear(1, times), nn.SiLU(), nn.Linear(times, times)
        )
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down1 = DownBlock(channels, channels, times)
        self.down2 = DownBlock(channels, 2 * channels, times)
        self.middle = ResidualBlock(2 * channels, 2 * channels, times)
        self.up2 = UpBlock(2 * channels, 2 * channels, times)
        self.up1 = UpBlock(2 * channels, channels, times)
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        embedded = self.time(time)
        x, skip1 = self.down1(self.first(noisy), embedded)
        x, skip2 = self.down2(x, embedded)
        x = self.up2(self.middle(x, embedded), embedded, skip=skip2)
        x = self.up1(x, embedded, skip=skip1)
        return F.mse_loss(self.last(x), noise)


def unet_block(module: nn.Module) -> bool:
    """Return whether a module of the U-Net is gathered as one."""
    return isinstance(module, DownBlock | ResidualBlock | UpBlock)
