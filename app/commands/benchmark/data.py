"""`python -m app benchmark data`: augmentation of whole batches against one sample at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision.transforms import v2

from .images import RandomImages
from .rows import Row, quiet_lightning, ratio_to, setting, show, timed
from .timing import CLOCKS, interleave

AUGMENTATIONS = ("crop_flip", "crop_flip_randaugment")
MEAN_STD = ((0.5,) * 3, (0.5,) * 3)


def run(
    device: torch.device, batch_size: int, images: int, repeats: int, clock: str = "wall"
) -> list[Row]:
    """Times both pipelines on one thread (ours on `device`) and prints the table.

    Args:
        device: where our images lie and are augmented.
        batch_size: images of a batch.
        images: of one measurement, rounded up to whole batches.
        repeats: interleaved rounds.
        clock: name of one of `timing.CLOCKS`.
    """
    batches = -(-images // batch_size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases: dict[str, Callable[[], None]] = {}
        for augmentation in AUGMENTATIONS:
            ours = _ours(augmentation, batch_size, device)
            cases[f"ours:{augmentation}"] = _take(_endless(ours), batches)
            for kind in ("pil", "tensor"):
                loader = _per_sample(augmentation, kind, batch_size)
                cases[f"per_sample_{kind}:{augmentation}"] = _take(_endless(loader), batches)
        with Progress(transient=True) as progress:
            bar = progress.add_task("batches", total=(repeats + 1) * len(cases))
            seconds = interleave(
                cases, repeats, device, done=lambda: progress.advance(bar), clock=CLOCKS[clock]
            )
        common = setting("data", device, "uint8", clock=clock, batch_size=batch_size)
    finally:
        torch.set_num_threads(threads)
    rows = []
    for name in cases:
        taken = [value / batches for value in seconds[name]]
        row = timed(name, "batch", taken)
        row["images_per_second"] = batch_size / row["median_s"]
        augmentation = name.partition(":")[2]
        for kind in ("pil", "tensor"):
            other = seconds[f"per_sample_{kind}:{augmentation}"]
            row |= ratio_to(f"per_sample_{kind}", taken, [value / batches for value in other])
        row["speedup"] = min(1 / row[f"ratio_to_per_sample_{kind}"] for kind in ("pil", "tensor"))
        rows.append(common | row)
    show(
        f"Data: batch {batch_size}, 32 x 32 colour images, {rows[0]['hardware']}, one thread",
        rows,
        {
            "case": "case",
            "median_s": "batch ms",
            "spread": "spread %",
            "images_per_second": "images/s",
            "speedup": "x per-sample",
        },
        "x per-sample: times as fast as the faster of the two torchvision pipelines.",
    )
    return rows


def _ours(augmentation: str, batch_size: int, device: torch.device) -> Any:
    ops = 2 if augmentation.endswith("randaugment") else 0
    data = RandomImages(images=10_000, batch_size=batch_size, randaugment_ops=ops)
    data.device = device.type
    with quiet_lightning():
        data.setup("fit")
    return data.train_dataloader()


class _Samples(Dataset):
    """The same images one by one, as torchvision's CIFAR10 hands them out (`pil`) or as tensors."""

    def __init__(self, augmentation: str, kind: str) -> None:
        self.data = RandomImages(images=10_000).read("train")
        self.pil = kind == "pil"
        self.pixels = self.data.images.permute(0, 2, 3, 1).numpy() if self.pil else None
        t = v1 if self.pil else v2
        randaugment = [t.RandAugment(2, 9)] if augmentation.endswith("randaugment") else []
        to_float = [v1.ToTensor()] if self.pil else [v2.ToDtype(torch.float32, scale=True)]
        self.transform = t.Compose(
            [
                t.RandomCrop(32, padding=4),
                t.RandomHorizontalFlip(),
                *randaugment,
                *to_float,
                t.Normalize(*MEAN_STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.pixels[index]) if self.pil else self.data.images[index]
        return self.transform(image), int(self.data.labels[index])


def _per_sample(augmentation: str, kind: str, batch_size: int) -> DataLoader:
    return DataLoader(_Samples(augmentation, kind), batch_size, shuffle=True, drop_last=True)


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _take(batches: Iterator[Any], count: int) -> Callable[[], None]:
    def take() -> None:
        for _ in range(count):
            next(batches)

    return take
