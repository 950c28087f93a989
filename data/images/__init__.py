"""Images: data sets, reading and augmentation."""

from .module import CIFAR10Data, DigitsData, ImageData, ImageFolderData, TinyImageNetData

__all__ = ["CIFAR10Data", "DigitsData", "ImageData", "ImageFolderData", "TinyImageNetData"]
