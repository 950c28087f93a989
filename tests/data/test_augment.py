"""Batched augmentation equals a loop over images with the same parameters."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from data.batches import seeded_generator
from data.images.augment import Flip, Normalize, PadCrop, RandAugment, RandomErasing, augment

TRANSFORMS = [PadCrop(2), Flip(), RandAugment(2, 15), RandomErasing(0.5, (0.4, 0.5, 0.6))]


@pytest.fixture
def images():
    """Smooth uint8 images [24, 3, 20, 24]; equalize needs over 255 pixels."""
    noise = torch.rand(24, 3, 4, 4, generator=seeded_generator(0))
    smooth = F.interpolate(noise, size=(20, 24), mode="bilinear")
    return (smooth * 255).round().to(torch.uint8)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: type(t).__name__)
def test_transform_is_deterministic_and_differs_between_samples(transform, images):
    same = images[:1].expand(24, -1, -1, -1)
    before = same.clone()
    first = transform.apply(same, transform.draw(24, seeded_generator(1)))
    second = transform.apply(same, transform.draw(24, seeded_generator(1)))
    assert first.dtype == torch.uint8 and first.shape == images.shape
    assert torch.equal(first, second) and torch.equal(same, before)
    assert len(first.unique(dim=0)) > 1
    assert not torch.equal(first, transform.apply(same, transform.draw(24, seeded_generator(2))))


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_together_give_the_whole_batch(world_size, images):
    whole = augment(images, TRANSFORMS, 24, slice(0, 24), seeded_generator(5))
    size = 24 // world_size
    slices = [slice(rank * size, (rank + 1) * size) for rank in range(world_size)]
    parts = [augment(images[s], TRANSFORMS, 24, s, seeded_generator(5)) for s in slices]
    assert torch.equal(torch.cat(parts), whole)


def test_pad_crop_equals_a_loop(images):
    crop = PadCrop(3)
    params = crop.draw(24, seeded_generator(0))
    assert params["corner"].min() == 0 and params["corner"].max() == 6
    expected = [
        F.pad(image, (3, 3, 3, 3))[:, top : top + 20, left : left + 24]
        for image, (top, left) in zip(images, params["corner"].tolist(), strict=True)
    ]
    assert torch.equal(crop.apply(images, params), torch.stack(expected))


def test_flip_equals_a_loop(images):
    params = Flip().draw(24, seeded_generator(0))
    assert 4 < params["flip"].sum() < 20
    pairs = zip(images, params["flip"].tolist(), strict=True)
    expected = [image.flip(-1) if flip else image for image, flip in pairs]
    assert torch.equal(Flip().apply(images, params), torch.stack(expected))


def reference(image, name, sign, magnitude):
    """One operation of torchvision's RandAugment on one image [C, H, W]."""
    level, (height, width) = magnitude / 30, image.shape[1:]
    factor = 1 + sign * 0.9 * level
    shear = sign * math.degrees(math.atan(0.3 * level))
    x, y = (sign * int(150 / 331 * side * level) for side in (width, height))

    def affine(translate=(0, 0), shear=(0, 0), center=None):
        return tv.affine(
            image, 0, list(translate), 1, list(shear), InterpolationMode.BILINEAR, center=center
        )

    operations = {
        "shear_x": lambda: affine(shear=(shear, 0), center=[0, 0]),
        "shear_y": lambda: affine(shear=(0, shear), center=[0, 0]),
        "translate_x": lambda: affine((x, 0)),
        "translate_y": lambda: affine((0, y)),
        "rotate": lambda: tv.rotate(image, sign * 30 * level, InterpolationMode.BILINEAR),
        "brightness": lambda: tv.adjust_brightness(image, factor),
        "color": lambda: tv.adjust_saturation(image, factor),
        "contrast": lambda: tv.adjust_contrast(image, factor),
        "sharpness": lambda: tv.adjust_sharpness(image, factor),
        "posterize": lambda: tv.posterize(image, round(8 - 4 * level)),
        "solarize": lambda: tv.solarize(image, 255 * (1 - level)),
        "autocontrast": lambda: tv.autocontrast(image),
        "equalize": lambda: tv.equalize(image),
        "identity": lambda: image,
    }
    return operations[name]()


@pytest.mark.parametrize("name", RandAugment.OPS)
def test_each_operation_equals_torchvision(name, images):
    randaugment = RandAugment(1, 20)
    op = torch.full((24, 1), RandAugment.OPS.index(name))
    sign = torch.tensor([1, -1]).repeat(12)[:, None]
    result = randaugment.apply(images, {"op": op, "sign": sign})
    if name != "identity":
        assert not torch.equal(result, images)
    for image, changed, s in zip(images, result, sign[:, 0].tolist(), strict=True):
        difference = reference(image, name, s, 20).int() - changed.int()
        assert difference.abs().max() <= 1  # one grey level, from rounding


def test_mixed_operations_equal_a_loop(images):
    randaugment = RandAugment(2, 9)
    params = randaugment.draw(24, seeded_generator(0))
    result = randaugment.apply(images, params)
    for i, image in enumerate(images):
        for op, sign in zip(params["op"][i].tolist(), params["sign"][i].tolist(), strict=True):
            image = reference(image, RandAugment.OPS[op], sign, 9)
        # Two roundings in a row, which equalize can spread a little further.
        assert (image.int() - result[i].int()).abs().float().mean() < 1


def test_draws_cover_all_operations_and_both_signs():
    params = RandAugment(2).draw(500, seeded_generator(0))
    assert set(params["op"].unique().tolist()) == set(range(14))
    assert set(params["sign"].unique().tolist()) == {-1, 1}


def test_randaugment_takes_grey_images():
    grey = torch.randint(0, 256, (40, 1, 8, 8), generator=seeded_generator(0)).to(torch.uint8)
    randaugment = RandAugment(3, 9)
    assert randaugment.apply(grey, randaugment.draw(40, seeded_generator(1))).shape == grey.shape


def test_erasing_fills_one_rectangle(images):
    erasing = RandomErasing(0.5, (0.0, 0.5, 1.0))
    params = erasing.draw(24, seeded_generator(0))
    result = erasing.apply(images.clamp(1, 254), params)
    erased = (result == torch.tensor([0, 128, 255])[:, None, None]).all(1)
    for mask, box in zip(erased, params["box"], strict=True):
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns[None, :])
        top, left, bottom, right = (box * torch.tensor([20, 24, 20, 24])).tolist()
        assert abs(rows.sum() - (bottom - top)) <= 1 and abs(columns.sum() - (right - left)) <= 1
    assert 4 < (params["box"].sum(1) > 0).sum() < 20


def test_normalize_equals_torchvision(images):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    expected = tv.normalize(images.float() / 255, list(mean), list(std))
    result = Normalize(mean, std)(images)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_equals_cpu(images):
    on_cpu = augment(images, TRANSFORMS, 24, slice(0, 24), seeded_generator(5))
    on_gpu = augment(images.cuda(), TRANSFORMS, 24, slice(0, 24), seeded_generator(5)).cpu()
    assert (on_cpu.int() - on_gpu.int()).abs().float().mean() < 0.5
