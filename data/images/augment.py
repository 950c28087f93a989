"""Augmentation of whole batches of uint8 images, on the device where they lie.

Shapes: N images, C channels, H height, W width.

Each transform has two halves. `draw(n, generator)` draws the parameters of n images on the CPU;
`apply(images, params)` is deterministic. So a process can draw for a whole batch and apply its
part, and nothing random happens on an accelerator. No transform loops over images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

Params = dict[str, Tensor]


class Transform(Protocol):
    """What every class below offers."""

    def draw(self, n: int, generator: torch.Generator) -> Params:
        """Draw parameters for n images; each value has n as its first dimension."""

    def apply(self, images: Tensor, params: Params) -> Tensor:
        """Transform uint8 images [N, C, H, W] by their parameters, leaving the input as it is."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a small CPU tensor; pinned first, because a copy from pageable memory waits for CUDA."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def augment(
    images: Tensor,
    transforms: Sequence[Transform],
    n: int,
    local: slice,
    generator: torch.Generator,
) -> Tensor:
    """Apply transforms, in order, to this process's part of a batch.

    Args:
        images: uint8 [N, C, H, W], the images of the part.
        transforms: Applied in order.
        n: Images in the whole batch; parameters are drawn for all of them.
        local: The part of the batch that `images` is.
        generator: CPU generator of this batch.
    """
    for transform in transforms:
        params = transform.draw(n, generator)
        images = transform.apply(images, {name: value[local] for name, value in params.items()})
    return images


class PadCrop:
    """Pad `padding` black pixels on all sides, crop to the original size at a random place."""

    def __init__(self, padding: int = 4):
        self.padding = padding

    def draw(self, n: int, generator: torch.Generator) -> Params:
        """Draw `corner` [n, 2]: row and column of the crop in the padded image, from 0."""
        return {"corner": torch.randint(2 * self.padding + 1, (n, 2), generator=generator)}

    def apply(self, images: Tensor, params: Params) -> Tensor:
        height, width = images.shape[-2:]
        top, left = to_device(params["corner"], images.device).unbind(1)
        padded = F.pad(images, (self.padding,) * 4)
        # A view of every possible crop, [N, C, tops, lefts, H, W]: indexing copies only one each.
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)
        return crops[torch.arange(len(images), device=images.device), :, top, left]


class Flip:
    """Mirror left and right, each image with probability `p`."""

    def __init__(self, p: float = 0.5):
        self.p = p

    def draw(self, n: int, generator: torch.Generator) -> Params:
        """Draw `flip` [n], bool."""
        return {"flip": torch.rand(n, generator=generator) < self.p}

    def apply(self, images: Tensor, params: Params) -> Tensor:
        flip = to_device(params["flip"], images.device)
        return torch.where(flip[:, None, None, None], images.flip(-1), images)


def _signed(adjust: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float, int], Tensor]:
    return lambda images, level, sign: adjust(images, 1 + sign * 0.9 * level)


GEOMETRY = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
# Called with images, the strength in 0 to 1 and the sign, of which UNSIGNED have no use.
SIGNED = {
    "brightness": _signed(tv.adjust_brightness),
    "color": _signed(tv.adjust_saturation),
    "contrast": _signed(tv.adjust_contrast),
    "sharpness": _signed(tv.adjust_sharpness),
}
UNSIGNED = {
    "posterize": lambda images, level, _: tv.posterize(images, round(8 - 4 * level)),
    "solarize": lambda images, level, _: tv.solarize(images, 255 * (1 - level)),
    "autocontrast": lambda images, *_: tv.autocontrast(images),
    "equalize": lambda images, *_: tv.equalize(images),
}
COLOUR = SIGNED | UNSIGNED


class RandAugment:
    """`num_ops` random operations in a row for each image (Cubuk et al. 2020, arXiv:1909.13719).

    The 14 operations and their strengths are those of torchvision's RandAugment with 31 magnitude
    bins. Geometry is resampled bilinearly, black outside the image. Images have 1 or 3 channels.

    Args:
        num_ops: Operations for each image, drawn with replacement.
        magnitude: Strength of every operation, 0 to 30.
    """

    OPS = (*GEOMETRY, *COLOUR, "identity")

    def __init__(self, num_ops: int = 2, magnitude: int = 9):
        self.num_ops, self.level = num_ops, magnitude / 30

    def draw(self, n: int, generator: torch.Generator) -> Params:
        """Draw `op` [n, num_ops], indices into OPS, and `sign` [n, num_ops], -1 or 1."""
        size = (n, self.num_ops)
        return {
            "op": torch.randint(len(self.OPS), size, generator=generator),
            "sign": torch.randint(2, size, generator=generator) * 2 - 1,
        }

    def apply(self, images: Tensor, params: Params) -> Tensor:
        images = images.clone()
        for op, sign in zip(params["op"].unbind(1), params["sign"].unbind(1), strict=True):
            self._apply_one_each(images, op, sign)
        return images

    def _apply_one_each(self, images: Tensor, op: Tensor, sign: Tensor) -> None:
        """Apply operation op[i] with sign[i] to image i, in place, one call for each kind.

        All geometry is one kind. The rows of all kinds are found on the CPU and sent in one copy.
        """
        first_signed = len(GEOMETRY)
        signed = (op >= first_signed) & (op < first_signed + len(SIGNED))
        kind = torch.where(op < first_signed, 0, 2 * op + (signed & (sign > 0)))
        counts = torch.bincount(kind, minlength=2 * len(self.OPS)).tolist()
        order = kind.argsort(stable=True)
        groups = to_device(order, images.device).split(counts)
        for index, rows in enumerate(groups):
            if not len(rows) or index == 2 * self.OPS.index("identity"):
                continue
            chosen = images.index_select(0, rows)
            if index == 0:
                first = order[: len(rows)]  # the same rows, on the CPU
                changed = self._warp(chosen, op[first], sign[first])
            else:
                recolour = COLOUR[self.OPS[index // 2]]
                changed = recolour(chosen, self.level, 1 if index % 2 else -1)
            images.index_copy_(0, rows, changed)

    def _warp(self, images: Tensor, op: Tensor, sign: Tensor) -> Tensor:
        """Resample uint8 images by a matrix each, all in one call."""
        height, width = images.shape[-2:]
        theta = to_device(self._matrices(op, sign, height, width), images.device)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        warped = F.grid_sample(images.float(), grid, mode="bilinear", align_corners=False)
        return warped.round_().clamp_(0, 255).to(torch.uint8)

    def _matrices(self, op: Tensor, sign: Tensor, height: int, width: int) -> Tensor:
        """Return [N, 2, 3]: from output to input coordinates, both from -1 to 1."""
        level = self.level
        tall, wide = height / width, width / height  # one axis's unit measured in the other's

        def where(name: str, value: float) -> Tensor:
            return torch.where(op == self.OPS.index(name), sign * value, 0.0)

        shear_x, shear_y = where("shear_x", 0.3 * level), where("shear_y", 0.3 * level)
        # Whole pixels; 2 / width is one pixel.
        shift_x = where("translate_x", int(150 / 331 * width * level) * 2 / width)
        shift_y = where("translate_y", int(150 / 331 * height * level) * 2 / height)
        angle = where("rotate", math.radians(30) * level)
        # Shear leaves the top and left edges in place, as in the published operations.
        rows = [
            angle.cos(), (shear_x - angle.sin()) * tall, shear_x * tall - shift_x,
            (shear_y + angle.sin()) * wide, angle.cos(), shear_y * wide - shift_y,
        ]  # fmt: skip
        return torch.stack(rows, 1).view(-1, 2, 3)


class RandomErasing:
    """Fill one random rectangle (Zhong et al. 2020, arXiv:1708.04896).

    Args:
        p: Probability for each image.
        fill: Colour in 0 to 1, a value for each channel; the data's mean becomes 0 when normalised.
        area: Smallest and largest part of the image that is erased.
        ratio: Smallest and largest height over width.
    """

    def __init__(
        self,
        p: float,
        fill: Sequence[float],
        area: tuple[float, float] = (0.02, 0.33),
        ratio: tuple[float, float] = (0.3, 3.3),
    ):
        self.p, self.area, self.ratio = p, area, ratio
        self.fill = torch.tensor(fill).mul(255).round().to(torch.uint8).view(-1, 1, 1)

    def draw(self, n: int, generator: torch.Generator) -> Params:
        """Draw `box` [n, 4]: top, left, bottom, right in 0 to 1; all 0 where nothing is erased."""
        erase, area, ratio, top, left = torch.rand(5, n, generator=generator)
        area = self.area[0] + area * (self.area[1] - self.area[0])
        low, high = (math.log(value) for value in self.ratio)
        ratio = (low + ratio * (high - low)).exp()
        height, width = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        top, left = top * (1 - height), left * (1 - width)
        box = torch.stack([top, left, top + height, left + width], 1)
        return {"box": box * (erase < self.p)[:, None]}

    def apply(self, images: Tensor, params: Params) -> Tensor:
        """Erase the pixels whose centre lies in the box."""
        height, width = images.shape[-2:]
        device = images.device
        self.fill = self.fill.to(device)  # copied once: the device does not change in a run
        top, left, bottom, right = to_device(params["box"], device)[:, :, None].unbind(1)
        y = (torch.arange(height, device=device) + 0.5) / height
        x = (torch.arange(width, device=device) + 0.5) / width
        rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)  # [N, H], [N, W]
        return torch.where((rows[:, :, None] & columns[:, None, :])[:, None], self.fill, images)


class Normalize:
    """Turn uint8 images into float32 with about zero mean and unit variance in each channel.

    Args:
        mean: Mean of each channel, of pixels in 0 to 1.
        std: Standard deviation of each channel, likewise.
        device: Where the images lie.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu"
    ):
        scale = 1 / torch.tensor(std)
        self.bias = (-torch.tensor(mean) * scale).view(-1, 1, 1).to(device)
        self.scale = (scale / 255).view(-1, 1, 1).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise uint8 images [N, C, H, W] into float32 of the same shape."""
        return images.float().mul_(self.scale).add_(self.bias)
