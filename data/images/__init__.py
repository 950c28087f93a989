"""Images: data sets, reading and augmentation."""

from .cifar10 import CIFAR10Data
from .digits import DigitsData
from .folder import ImageFolderData
from .module import ImageData
from .tiny_imagenet import TinyImageNetData

__all__ = ["CIFAR10Data", "DigitsData", "ImageData", "ImageFolderData", "TinyImageNetData"]
