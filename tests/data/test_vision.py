"""The data modules read every layout, and say in one line what is wrong with broken data."""

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import threading
import zipfile
import zlib
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jsonargparse import ArgumentParser
from PIL import Image
from torchvision.datasets import CIFAR10

from data import CIFAR10Data, DigitsData, ImageData, ImageFolderData, TinyImageNetData
from data.errors import DataError
from data.images.module import stratified_split
from data.images.reading import ImageSet, decode_images

WNIDS = ["n01443537", "n01629819", "n02124075"]


def pixels(n, size=32, seed=0):
    """Random uint8 images [n, size, size, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (n, size, size, 3), dtype=np.uint8)


def encode(image, kind="PNG"):
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, kind)
    return stream.getvalue()


def write_parquet(file, images, labels, column="img", class_names=None):
    """Write images (arrays or encoded bytes) as Hugging Face datasets does."""
    cells = [
        {"bytes": image if isinstance(image, bytes | None) else encode(image), "path": f"{i}.png"}
        for i, image in enumerate(images)
    ]
    table = pa.table({column: cells, "label": labels})
    if class_names:
        features = {"label": {"names": class_names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file)


def write_folder(folder, images, suffix=".png"):
    folder.mkdir(parents=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i}{suffix}")


def cifar_parquet(root, n=20):
    write_parquet(root / "train-00000-of-00001.parquet", pixels(n), [i % 10 for i in range(n)])
    write_parquet(root / "test-00000-of-00001.parquet", pixels(10, seed=1), list(range(10)))


def tiny_official(root):
    for i, wnid in enumerate(WNIDS):
        write_folder(root / "train" / wnid / "images", pixels(4, 64, seed=i), ".JPEG")
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("0.JPEG\t0\t0\t9\t9\n")
    write_folder(root / "val" / "images", pixels(3, 64, seed=9), ".JPEG")
    rows = [f"{i}.JPEG\t{wnid}\t0\t0\t9\t9" for i, wnid in enumerate(reversed(WNIDS))]
    (root / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")


def own_images(root, splits=("train", "val")):
    for split in splits:
        for i, name in enumerate(("bee", "ant")):
            write_folder(root / split / name, pixels(6, 20, seed=i))


def ready(data, stage=None):
    data.prepare_data()
    data.setup(stage)
    return data


def fails(data, *words, stage=None):
    """The data module raises a DataError of one line that has all the words."""
    with pytest.raises(DataError) as caught:
        ready(data, stage)
    message = str(caught.value)
    assert "\n" not in message
    assert all(str(word) in message for word in words), message


def stored(data, split):
    """Images of a split as uint8 [N, H, W, C] arrays, for comparison with what was written."""
    return data._split(split).images.permute(0, 2, 3, 1).numpy()


# ---- digits, and what all data modules share


def test_digits_split_and_batches():
    data = ready(DigitsData(batch_size=100))
    assert (data.num_classes, data.image_shape, data.num_train) == (10, (1, 8, 8), 1438)
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (100, 1, 8, 8) and images.dtype == torch.float32
    assert labels.shape == (100,) and labels.dtype == torch.int64
    assert len(data.train_dataloader()) == 14
    assert sum(len(labels) for _, labels in data.test_dataloader()) == 359
    rows = data._split("train").names + data._split("test").names
    assert len(set(rows)) == len(rows) == 1797
    whole = torch.cat([images for images, _ in data.test_dataloader()])
    assert abs(whole.mean()) < 0.05 and abs(whole.std() - 1) < 0.05


def test_digits_can_be_larger_and_coloured():
    data = ready(DigitsData(channels=3, image_size=16))
    images, _ = next(iter(data.val_dataloader()))
    assert images.shape[1:] == data.image_shape == (3, 16, 16)
    assert torch.equal(images[:, 0], images[:, 2])


def test_stratified_split():
    labels = torch.tensor([0] * 40 + [1] * 20 + [2] * 10)[torch.randperm(70)]
    train, held_out = stratified_split(labels, 0.2, seed=1)
    assert sorted(train.tolist() + held_out.tolist()) == list(range(70))
    assert labels[held_out].bincount().tolist() == [8, 4, 2]
    assert torch.equal(stratified_split(labels, 0.2, seed=1)[1], held_out)
    assert not torch.equal(stratified_split(labels, 0.2, seed=2)[1], held_out)


def test_val_fraction_holds_out_training_images():
    plain, split = ready(DigitsData()), ready(DigitsData(val_fraction=0.1))
    assert plain._split("val") is plain._split("test")
    train, val = (set(split._split(name).names) for name in ("train", "val"))
    assert not train & val and train | val == set(plain._split("train").names)
    assert split._split("test").names == plain._split("test").names


def test_validating_on_the_test_set_is_said(caplog):
    with caplog.at_level("INFO"):
        ready(DigitsData(val_fraction=0.5), "fit")
        assert "test set" not in caplog.text
        ready(DigitsData(), "fit")
    assert caplog.text.count("Validation uses the test set") == 1


def test_equal_seed_gives_equal_batches():
    first, second, other = (
        next(iter(ready(DigitsData(seed=seed, randaugment_ops=1)).train_dataloader()))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(first[1], other[1])


def as_rank(data, rank, world_size, at=(1, 2)):
    """Attach a stand-in for the trainer of one process."""
    progress = SimpleNamespace(current=SimpleNamespace(ready=at[1]))
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        current_epoch=at[0],
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return data


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_batches(world_size):
    options = {"randaugment_ops": 1, "erasing": 0.5, "eval_batch_size": 50}
    whole = ready(as_rank(DigitsData(**options), 0, 1))
    parts = [ready(as_rank(DigitsData(**options), r, world_size)) for r in range(world_size)]
    shares = zip(*(part.train_dataloader() for part in parts), strict=True)
    for (images, labels), share in zip(whole.train_dataloader(), shares, strict=True):
        assert torch.equal(torch.cat([part[0] for part in share]), images)
        assert torch.equal(torch.cat([part[1] for part in share]), labels)
    tested = [labels for part in parts for _, labels in part.test_dataloader()]
    assert sum(len(labels) for labels in tested) == 359


def test_predict_batches_have_indices_into_names(tmp_path):
    data = ready(DigitsData(), "predict")
    indices = torch.cat([index for _, index in data.predict_dataloader()])
    assert indices.tolist() == list(range(359))
    assert data.predict_names[0].startswith("row ")

    write_folder(tmp_path / "new" / "deep", pixels(3, 20))
    own = ready(DigitsData(predict_folder=str(tmp_path / "new")), "predict")
    images, indices = next(iter(own.predict_dataloader()))
    assert images.shape == (3, 1, 8, 8)
    assert [own.predict_names[i] for i in indices] == ["deep/0.png", "deep/1.png", "deep/2.png"]


@pytest.mark.parametrize(
    "option",
    [
        {"batch_size": 0},
        {"crop_padding": -1},
        {"erasing": 1.5},
        {"val_fraction": 1.0},
        {"randaugment_magnitude": 31},
        {"seed": -1},
        {"image_size": 0},
        {"channels": 2},
    ],
)
def test_impossible_settings_are_named(option):
    (name,) = option
    with pytest.raises(DataError, match=f"--data.{name} is"):
        DigitsData(**option)


def test_batch_size_larger_than_the_data():
    data = ready(DigitsData(batch_size=2000))
    with pytest.raises(DataError, match=r"batch_size=2000.*1438"):
        data.train_dataloader()


@pytest.mark.parametrize("kind", [CIFAR10Data, DigitsData, ImageFolderData, TinyImageNetData])
def test_command_line_sees_all_options_with_help(kind):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "data")
    flags = ["--data.batch_size=7", "--data.flip=false", "--data.image_size=9"]
    parsed = parser.parse_args(flags + ["--data.root=x"] * (kind is not DigitsData)).data
    assert (parsed.batch_size, parsed.flip, parsed.image_size) == (7, False, 9)
    assert kind(**parsed).batch_size == 7
    text = parser.format_help()
    assert "Probability that a random rectangle" in text and "random crop" in text


# ---- CIFAR-10


def test_cifar_parquet(tmp_path):
    cifar_parquet(tmp_path)
    data = ready(CIFAR10Data(str(tmp_path), batch_size=8))
    assert np.array_equal(stored(data, "train"), pixels(20))
    assert data._split("train").labels.tolist() == [i % 10 for i in range(20)]
    assert data.predict_names[3] == "3.png"
    assert data.class_names[0] == "airplane"
    assert next(iter(data.train_dataloader()))[0].shape == (8, 3, 32, 32)


def test_cifar_parquet_in_a_subfolder_in_parts_and_jpeg(tmp_path):
    jpeg = [encode(image, "JPEG") for image in pixels(10)]
    for part in range(2):
        file = tmp_path / "plain_text" / f"train-0000{part}-of-00002.parquet"
        write_parquet(file, jpeg[part * 5 : part * 5 + 5], list(range(5)))
    data = CIFAR10Data(str(tmp_path), batch_size=8)
    data.prepare_data()
    assert data.num_train == 10
    fails(data, tmp_path, "test-*.parquet", stage="test")
    file.unlink()
    fails(CIFAR10Data(str(tmp_path)), "1 of 2 parts", "train-00000-of-00002.parquet")


class Malicious:
    def __reduce__(self):
        return print, ("ran",)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A small copy of the published python version, whose checksums torchvision is told."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    batches = [
        write(
            name,
            {
                "data": pixels(4, seed=seed).transpose(0, 3, 1, 2).reshape(4, -1),
                "labels": [0, 1, 2, 3],
            },
        )
        for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"])
    ]
    name, md5 = write("batches.meta", {"label_names": CIFAR10Data().class_names})
    monkeypatch.setattr(CIFAR10, "train_list", batches[:5])
    monkeypatch.setattr(CIFAR10, "test_list", batches[5:])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return folder


def test_cifar_published(tmp_path, published):
    data = ready(CIFAR10Data(str(tmp_path)))
    assert np.array_equal(stored(data, "train")[4:8], pixels(4, seed=1))
    assert np.array_equal(stored(data, "test"), pixels(4, seed=5))
    assert data._split("train").labels.tolist() == [0, 1, 2, 3] * 5
    assert data.predict_names[2] == "test image 2"
    assert ready(CIFAR10Data(str(tmp_path), image_size=16)).image_shape == (3, 16, 16)


def test_cifar_published_and_changed(tmp_path, published, capsys):
    file = published / "data_batch_3"
    file.write_bytes(pickle.dumps(Malicious()))
    fails(CIFAR10Data(str(tmp_path)), published, "not as it was published", "remove")
    assert "ran" not in capsys.readouterr().out
    file.unlink()
    fails(CIFAR10Data(str(tmp_path)), published, "missing", "remove")


def test_cifar_folders(tmp_path):
    for split in ("train", "test"):
        for name in CIFAR10Data().class_names:
            write_folder(tmp_path / split / name, pixels(2))
    data = ready(CIFAR10Data(str(tmp_path)))
    assert data._split("train").labels.tolist() == [i // 2 for i in range(20)]
    (tmp_path / "test" / "cat").rename(tmp_path / "test" / "lion")
    fails(CIFAR10Data(str(tmp_path)), tmp_path / "test" / "lion", "'lion'", stage="test")


def test_cifar_missing(tmp_path, monkeypatch):
    missing = tmp_path / "none"
    fails(CIFAR10Data(str(missing), download=False), missing, "--data.root")
    with pytest.raises(DataError, match="no CIFAR-10 here"):
        CIFAR10Data(str(missing)).setup("fit")

    def offline(*_, **__):
        raise OSError("no network\nat all")

    monkeypatch.setattr("data.images.reading.download_and_extract_archive", offline)
    fails(CIFAR10Data(str(missing)), "cifar-10-python.tar.gz", "no network", "--data.root")
    (tmp_path / "thesis.txt").touch()
    fails(CIFAR10Data(str(tmp_path)), tmp_path, "empty folder")
    fails(CIFAR10Data(str(tmp_path / "thesis.txt")), "thesis.txt")


def test_parquet_truncated(tmp_path):
    cifar_parquet(tmp_path)
    file = tmp_path / "train-00000-of-00001.parquet"
    content = file.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 5):
        file.write_bytes(content[:size])
        fails(CIFAR10Data(str(tmp_path)), file, "download it again")
    # The footer is whole, a page in the middle is not.
    file.write_bytes(content[:2000] + bytes(5000) + content[7000:])
    fails(CIFAR10Data(str(tmp_path)), file)


@pytest.mark.parametrize("label", [10, -1, None])
def test_parquet_label_outside_range(tmp_path, label):
    cifar_parquet(tmp_path)
    file = tmp_path / "train-00000-of-00001.parquet"
    write_parquet(file, pixels(3), [0, label, 2])
    fails(CIFAR10Data(str(tmp_path)), f"{file} row 1", f"label {label}", "0 to 9")


def test_parquet_columns(tmp_path):
    cifar_parquet(tmp_path)
    file = tmp_path / "train-00000-of-00001.parquet"
    write_parquet(file, pixels(2), [0, 1], column="picture")
    fails(CIFAR10Data(str(tmp_path)), file, "picture, label", "'img' or 'image'")
    pq.write_table(pa.table({"img": ["a"], "label": [0]}), file)
    fails(CIFAR10Data(str(tmp_path)), file, "'img' is string")
    pq.write_table(pa.table({"img": [{"bytes": b"x"}][:0], "label": [0][:0]}), file)
    fails(CIFAR10Data(str(tmp_path)), file)


@pytest.mark.parametrize("content", [b"no image", encode(pixels(1)[0], "JPEG")[:300], None])
def test_parquet_corrupt_image(tmp_path, content):
    cifar_parquet(tmp_path)
    file = tmp_path / "train-00000-of-00001.parquet"
    write_parquet(file, [pixels(1)[0], content], [0, 1])
    fails(CIFAR10Data(str(tmp_path)), f"{file} row 1")


def test_images_of_unequal_size(tmp_path):
    cifar_parquet(tmp_path)
    file = tmp_path / "train-00000-of-00001.parquet"
    write_parquet(file, [pixels(1, 32)[0], pixels(1, 30)[0][:20]], [0, 1])
    fails(CIFAR10Data(str(tmp_path)), f"{file} row 1", "30x20", "32x32", "--data.image_size")
    assert ready(CIFAR10Data(str(tmp_path), image_size=16)).num_train == 2
    write_parquet(file, pixels(2, 28), [0, 1])
    fails(CIFAR10Data(str(tmp_path)), "28", "--data.image_size")


def test_grey_images_become_rgb(tmp_path):
    cifar_parquet(tmp_path)
    file = tmp_path / "train-00000-of-00001.parquet"
    grey = pixels(2)[..., 0]
    write_parquet(file, list(grey), [0, 1])
    images = stored(ready(CIFAR10Data(str(tmp_path))), "train")
    assert all(np.array_equal(images[..., channel], grey) for channel in range(3))


def test_data_is_read_once(tmp_path):
    cifar_parquet(tmp_path)
    data = ready(CIFAR10Data(str(tmp_path)), "fit")
    shutil.rmtree(tmp_path)
    data.setup("validate")
    assert len(list(data.val_dataloader())) == 1


@pytest.mark.parametrize(
    ("copy", "words"),
    [
        ("train-00000-of-00001 (1).parquet", "would count twice"),
        ("train-copy.parquet", "would count twice"),
        ("default/train-00000-of-00001.parquet", "would count twice"),
    ],
)
def test_a_parquet_file_that_is_there_twice(tmp_path, copy, words):
    cifar_parquet(tmp_path)
    (tmp_path / copy).parent.mkdir(exist_ok=True)
    shutil.copy(tmp_path / "train-00000-of-00001.parquet", tmp_path / copy)
    fails(CIFAR10Data(str(tmp_path)), words, "remove one")
    write_parquet(tmp_path / copy, pixels(3, seed=5), [0, 1, 2])
    fails(CIFAR10Data(str(tmp_path)), "remove")


def test_two_columns_of_images(tmp_path):
    cifar_parquet(tmp_path)
    file = tmp_path / "train-00000-of-00001.parquet"
    cells = [{"bytes": encode(image), "path": None} for image in pixels(2)]
    pq.write_table(pa.table({"img": cells, "image": cells[::-1], "label": [0, 1]}), file)
    fails(CIFAR10Data(str(tmp_path)), file, "img, image, label", "either")


# ---- kinds of images


def decoded(image, kind="PNG", **options):
    """The pixels [H, W, 3] that are read of a Pillow image saved as `kind`."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return decode_images([stream.getvalue()], ["a"], None)[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_of_16_bits(kind):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    read = decoded(Image.fromarray(ramp), kind)
    assert read.mean() == 127.5 and len(np.unique(read)) == 256
    assert (np.diff(read[..., 0].flatten().astype(int)) >= 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_of_unknown_range(dtype):
    with pytest.raises(DataError, match="32-bit numbers of unknown range"):
        decoded(Image.fromarray(np.ones((4, 4), dtype)), "TIFF")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparent_parts_are_white(mode, caplog):
    image = Image.fromarray(np.full((2, 2, 3), 90, np.uint8))
    options = {}
    if mode == "RGB":
        image.putpixel((0, 0), (1, 2, 3))
        options["transparency"] = (1, 2, 3)
    else:
        image.putalpha(Image.fromarray(np.array([[0, 255], [255, 255]], np.uint8)))
        image = image.convert(mode)
    with caplog.at_level("INFO"):
        read = decoded(image, **options)
    expected = np.full((2, 2, 3), 90)
    expected[0, 0] = 255
    assert np.array_equal(read, expected)
    assert "1 of 1 images have transparent parts" in caplog.text


def test_full_opacity_changes_nothing(caplog):
    image = Image.fromarray(pixels(1)[0]).convert("RGBA")
    with caplog.at_level("INFO"):
        assert np.array_equal(decoded(image), pixels(1)[0])
    assert not caplog.text


def test_other_modes():
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    for image, kind in ((red.convert("P"), "PNG"), (red.convert("CMYK"), "TIFF")):
        assert (decoded(image, kind) == (255, 0, 0)).all()
    assert abs(decoded(red.convert("CMYK"), "JPEG").astype(int) - (255, 0, 0)).max() < 5


def test_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    read = decoded(Image.fromarray(pixels(1)[0][:20]), exif=exif)
    assert np.array_equal(read, np.rot90(pixels(1)[0][:20], -1))


def test_an_image_of_a_billion_pixels():
    def chunk(kind, content):
        sum_ = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", sum_)

    header = struct.pack(">IIBBBBB", 100_000, 10_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    with pytest.raises(DataError, match=r"^big.png: .*1000000000 pixels.*remove it$"):
        decode_images([bomb], ["big.png"], None)


# ---- Tiny ImageNet


def test_tiny_imagenet_parquet(tmp_path):
    names = [f"n{i:08}" for i in range(200)]
    for split, n in (("train", 6), ("valid", 4)):
        file = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        write_parquet(file, pixels(n, 64), [199] * n, "image", names)
    data = ready(TinyImageNetData(str(tmp_path), batch_size=2))
    assert data.class_names == names and data.num_classes == 200
    assert np.array_equal(stored(data, "test"), pixels(4, 64))
    file.write_bytes(file.read_bytes()[:50])
    fails(TinyImageNetData(str(tmp_path)), file, stage="test")


@pytest.mark.parametrize("inside", ["", "tiny-imagenet-200"])
def test_tiny_imagenet_official_folder(tmp_path, inside):
    tiny_official(tmp_path / inside)
    data = ready(TinyImageNetData(str(tmp_path), batch_size=2))
    assert data.class_names == WNIDS and data.num_train == 12
    assert data._split("train").labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data._split("val").labels.tolist() == [2, 1, 0]
    assert data.predict_names == ["0.JPEG", "1.JPEG", "2.JPEG"]


def test_tiny_imagenet_official_folder_broken(tmp_path):
    tiny_official(tmp_path)
    table = tmp_path / "val" / "val_annotations.txt"
    image = tmp_path / "val" / "images" / "1.JPEG"
    image.write_bytes(image.read_bytes()[:200])
    fails(TinyImageNetData(str(tmp_path)), image, stage="test")
    image.unlink()
    fails(TinyImageNetData(str(tmp_path)), image, stage="test")
    table.write_text("0.JPEG\tn99999999\t0\n")
    fails(TinyImageNetData(str(tmp_path)), f"{table} line 1", "n99999999", stage="test")
    table.write_text("")
    fails(TinyImageNetData(str(tmp_path)), table, stage="test")
    table.unlink()
    fails(TinyImageNetData(str(tmp_path)), table, stage="test")


def tiny_zip(folder, root, monkeypatch):
    """Pack the official layout and make its checksum the expected one."""
    tiny_official(folder / "tiny-imagenet-200")
    root.mkdir(exist_ok=True)
    file = root / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for path in (folder / "tiny-imagenet-200").rglob("*"):
            archive.write(path, path.relative_to(folder))
    md5 = hashlib.md5(file.read_bytes()).hexdigest()
    monkeypatch.setattr(TinyImageNetData, "md5", md5)
    return file


def test_tiny_imagenet_zip(tmp_path, monkeypatch):
    file = tiny_zip(tmp_path / "packed", tmp_path / "root", monkeypatch)
    data = ready(TinyImageNetData(str(file.parent), download=False, batch_size=2))
    assert data.class_names == WNIDS and data.num_train == 12
    assert {path.name for path in file.parent.iterdir()} == {file.name, "tiny-imagenet-200"}


@pytest.fixture
def serve():
    """Return a function that serves a folder on the loopback interface and returns its URL."""
    servers = []

    def start(folder):
        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *args):
                super().__init__(*args, directory=folder)

            def log_message(self, *args):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_tiny_imagenet_download(tmp_path, monkeypatch, serve):
    file = tiny_zip(tmp_path / "packed", tmp_path / "server", monkeypatch)
    data = TinyImageNetData(str(tmp_path / "root" / "deep"), batch_size=2)
    assert data.num_classes == 200  # a model can be built before the download
    data.url = f"{serve(file.parent)}/{file.name}"
    assert ready(data).num_train == 12

    other = TinyImageNetData(str(tmp_path / "other"))
    other.url, other.md5 = data.url, "0" * 32
    fails(other, tmp_path / "other" / file.name, "corrupted")
    other.url = data.url.replace("200", "404")
    fails(other, tmp_path / "other" / file.name.replace("200", "404"), "404")


def test_tiny_imagenet_zip_damaged(tmp_path, monkeypatch):
    file = tiny_zip(tmp_path / "packed", tmp_path / "root", monkeypatch)
    file.write_bytes(file.read_bytes()[:-50])
    fails(TinyImageNetData(str(file.parent), download=False), file, "damaged")
    md5 = hashlib.md5(file.read_bytes()).hexdigest()
    monkeypatch.setattr(TinyImageNetData, "md5", md5)
    fails(TinyImageNetData(str(file.parent)), file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # no half of a folder


# ---- a person's own images


def test_own_images(tmp_path):
    own_images(tmp_path)
    data = ready(ImageFolderData(str(tmp_path), image_size=16, batch_size=4))
    assert data.class_names == ["ant", "bee"] and data.image_shape == (3, 16, 16)
    assert data._split("val") is data._split("test")
    assert data._split("val").names[0] == "ant/0.png"
    assert data._split("val").labels.tolist() == [0] * 6 + [1] * 6


def test_own_images_with_all_three_splits(tmp_path):
    own_images(tmp_path, ("train", "val", "test"))
    (tmp_path / "val" / "bee" / "0.png").unlink()
    data = ready(ImageFolderData(str(tmp_path), image_size=16))
    assert [len(data._split(name)) for name in ("train", "val", "test")] == [12, 11, 12]


def test_own_images_are_cropped_to_the_centre(tmp_path):
    image = np.zeros((10, 30, 3), np.uint8)
    image[:, 10:20] = 255
    write_folder(tmp_path / "train" / "a", [image])
    write_folder(tmp_path / "test" / "a", [image])
    assert (stored(ready(ImageFolderData(str(tmp_path), image_size=10)), "train") == 255).all()


def test_own_images_broken(tmp_path):
    own_images(tmp_path, ("train",))
    root = str(tmp_path)
    fails(ImageFolderData(root), tmp_path, "val/", "--data.val_fraction")
    ready(ImageFolderData(root, val_fraction=0.5), "fit")
    fails(ImageFolderData(root, val_fraction=0.01), "--data.val_fraction", stage="fit")
    (tmp_path / "train" / "cow").mkdir()
    fails(ImageFolderData(root, val_fraction=0.5), tmp_path / "train" / "cow", "no images")
    bad = tmp_path / "train" / "cow" / "moo.jpg"
    bad.write_text("moo")
    fails(ImageFolderData(root, val_fraction=0.5), bad, "decoded")
    fails(ImageFolderData(str(tmp_path / "x")), tmp_path / "x", "no such folder")
    fails(ImageFolderData(str(tmp_path / "train" / "ant")), "train", "no such folder")
    fails(DigitsData(predict_folder=str(tmp_path / "x")), tmp_path / "x", stage="predict")


def test_what_is_passed_over_is_said(tmp_path, caplog):
    own_images(tmp_path)
    ant = tmp_path / "train" / "ant"
    for name in ("notes.txt", "more.TXT", "README", "._0.png", ".DS_Store"):
        (ant / name).write_text("no image")
    for folder in (tmp_path / "train", ant):
        (folder / "__MACOSX").mkdir()
        (folder / "__MACOSX" / "0.png").write_text("no image")
    os.mkfifo(ant / "pipe.png")  # opening it would wait for ever
    (ant / "gone.png").symlink_to("nowhere.png")
    shutil.copy(ant / "0.png", tmp_path / "train")
    with caplog.at_level("INFO"):
        data = ready(ImageFolderData(str(tmp_path), image_size=16))
    assert data.class_names == ["ant", "bee"] and data.num_train == 12
    (said,) = [line for line in caplog.messages if "passed over" in line]
    assert said.startswith(f"{tmp_path / 'train'}: passed over 9 files")
    for kind in (
        "2 .txt", "1 without suffix", "2 hidden", "1 __MACOSX", "2 no regular file",
        "1 outside the class folders",
    ):  # fmt: skip
        assert kind in said


def test_linked_class_folders(tmp_path):
    own_images(tmp_path / "elsewhere")
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
        for name in ("ant", "bee"):
            link = tmp_path / "data" / split / name
            link.symlink_to(tmp_path / "elsewhere" / split / name)
    inside = tmp_path / "elsewhere" / "train" / "ant"
    write_folder(tmp_path / "more", pixels(2, 20, seed=8))
    (inside / "more").symlink_to(tmp_path / "more")
    (inside / "round").symlink_to(inside)
    data = ready(ImageFolderData(str(tmp_path / "data"), image_size=16))
    assert data._split("train").labels.tolist() == [0] * 8 + [1] * 6
    assert data._split("train").names[6] == "ant/more/0.png"


def test_a_data_set_of_ones_own():
    class Stripes(ImageData):
        native_size, mean, std = 4, (0.5,) * 3, (0.5,) * 3
        class_names = ("dark", "light")

        def evaluation_split(self, name):
            return name

        def read(self, split):
            n = {"train": 6, "val": 4, "test": 2}[split]
            labels = torch.arange(n) % 2
            images = (labels * 255).to(torch.uint8).view(n, 1, 1, 1).expand(n, 3, 4, 4)
            return ImageSet(images, labels, [f"{split} {i}" for i in range(n)])

    data = ready(Stripes(batch_size=2, crop_padding=0))
    for loader, n in ((data.train_dataloader(), 6), (data.val_dataloader(), 4)):
        batches = list(loader)
        assert sum(len(labels) for _, labels in batches) == n
        assert all(torch.allclose(x[:, 0, 2, 2], y * 2.0 - 1) for x, y in batches)
    assert data.predict_names == ["test 0", "test 1"]
