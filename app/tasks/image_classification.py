"""Image classification."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchvision.transforms import v2

from ..errors import ConfigError
from .base import MoETask
from .samples import ImageSamples, spread


class ImageClassification(MoETask):
    """Cross-entropy over classes; top-1 and top-5 accuracy.

    Args:
        network: maps images (B, C, H, W) to logits (B, classes); has `num_classes`.
        optimizer: optimizer class; weight decay applies to matrices only.
        schedule: `cosine` down to 1 % of the learning rate, or `constant`; both after `warmup`.
        warmup: share of all optimizer steps over which the learning rate rises linearly.
        losses: weights of auxiliary losses, by name, summed over the MoE layers.
        balance_over: what the load of the load-balance loss is counted over: the `batch` of one
            process, the batches of all `ranks`, or all micro-batches of a `step` on all ranks.
        label_smoothing: probability spread over all classes.
        mixup: alpha of mixup (arXiv 1710.09412); 0 for none.
        cutmix: alpha of CutMix (arXiv 1905.04899); 0 for none. With both, each batch draws one.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        schedule: Literal["cosine", "constant"] = "cosine",
        warmup: float = 0.05,
        losses: dict[str, float] | None = None,
        balance_over: Literal["batch", "ranks", "step"] = "batch",
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__(network, optimizer, schedule, warmup, losses, balance_over)
        classes = getattr(network, "num_classes", None)
        if classes is None:
            raise ValueError("the network of an image classifier needs `num_classes`")
        for name, value, good in (
            ("label_smoothing", label_smoothing, 0.0 <= label_smoothing <= 1.0),
            ("mixup", mixup, mixup >= 0.0),
            ("cutmix", cutmix, cutmix >= 0.0),
        ):
            if not good:
                limits = "between 0 and 1" if name == "label_smoothing" else "0 or more"
                raise ValueError(f"model.{name} is {value}; it must be {limits}")
        self.label_smoothing = label_smoothing
        self.images: dict[str, Any] | None = None
        mixes = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
        mixes += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
        self.mix = v2.RandomChoice(mixes) if mixes else None
        top5 = min(5, classes)
        # Labels are checked when the data is read; here the check would make the host wait for
        # the GPU in every step.
        unchecked = {"average": "micro", "validate_args": False}
        self.train_accuracy = MulticlassAccuracy(classes, **unchecked)
        self.train_accuracy.persistent(True)  # an epoch resumed in its middle keeps its first half
        self.accuracy = nn.ModuleDict(
            {
                f"{split}_{name}": MulticlassAccuracy(classes, top_k=k, **unchecked)
                for split in ("val", "test")
                for name, k in (("accuracy", 1), ("accuracy_top5", top5))
            }
        )

        # Lightning's own mean over processes cuts the mean number of samples to an integer.
        self.eval_loss = nn.ModuleDict({"val_loss": MeanMetric(), "test_loss": MeanMetric()})

    def setup(self, stage: str) -> None:
        """Checks that network and data agree on the classes."""
        data = getattr(self.trainer, "datamodule", None)
        given = getattr(data, "num_classes", None)
        if given is not None and given > self.network.num_classes:
            raise ConfigError(
                f"model.network.num_classes is {self.network.num_classes} but the data has "
                f"{given} classes; set num_classes: {given}"
            )
        if given is not None:  # asked now: while training, the files may go
            channels, size, _ = data.image_shape
            self._check_shape(channels, size)
            self.images = {"class_names": list(data.class_names), "image_size": size}
            self.images |= {"channels": channels, "mean": list(data.mean), "std": list(data.std)}

    def _check_shape(self, channels: int, size: int) -> None:
        embedding = getattr(self.network, "patch_embed", None)  # networks of the user's own differ
        if embedding is None:
            return
        for name, ours, theirs in (
            ("image_size", embedding.img_size[0], size),
            ("channels", embedding.proj.in_channels, channels),
        ):
            if ours != theirs:
                raise ConfigError(
                    f"model.network.{name} is {ours} but that of the data is {theirs}; set both "
                    "to one value"
                )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what it takes to classify other images: class names, size and normalisation."""
        if self.images is not None:
            checkpoint["images"] = self.images

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (B, classes)."""
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        if self.mix is not None:
            images, labels = self.mix(images, labels)
        logits = self(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        self.log("train/loss", loss.detach(), prog_bar=True)
        hard = labels if labels.ndim == 1 else labels.argmax(1)
        self.train_accuracy.update(logits.detach(), hard)
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss + self.auxiliary_loss(batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, split: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        mean_loss = self.eval_loss[f"{split}_loss"]
        mean_loss.update(F.cross_entropy(logits, labels), len(labels))
        self.log(f"{split}/loss", mean_loss, batch_size=len(labels))
        for name in ("accuracy", "accuracy_top5"):
            metric = self.accuracy[f"{split}_{name}"]
            metric.update(logits, labels)
            bar = split == "val" and name == "accuracy"
            self.log(f"{split}/{name}", metric, prog_bar=bar, batch_size=len(labels))

    def samples(self, batch: tuple[Tensor, Tensor], count: int) -> ImageSamples | None:
        """Images, and how the network cuts them into tokens; None if that is not known."""
        grid = getattr(getattr(self.network, "patch_embed", None), "grid_size", None)
        if grid is None:
            return None
        images, labels = batch
        rows = spread(len(images), count)
        images, labels = images[rows], labels[rows].tolist()
        data = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "pixels"):
            images = data.pixels(images)
        else:
            low = images.amin((1, 2, 3), keepdim=True)
            images = 255 * (images - low) / (images.amax((1, 2, 3), keepdim=True) - low + 1e-9)
        names = getattr(data, "class_names", None)
        return ImageSamples(
            rows=rows,
            pixels=images.to(torch.uint8).movedim(1, -1).cpu().numpy(),
            captions=[names[label] if names else str(label) for label in labels],
            grid=tuple(grid),
            prefix=getattr(self.network, "num_prefix_tokens", 0),
        )

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        """Indices (B,), predicted classes (B,) and their probabilities (B,)."""
        images, indices = batch
        probability, label = self(images).softmax(1).max(1)
        return {"index": indices, "class": label, "probability": probability}
