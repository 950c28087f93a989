"""LightningDataModules, and what reads files into tensors."""

from .images.module import CIFAR10Data, DigitsData, ImageFolderData, TinyImageNetData
from .text.module import HuggingFaceText, TextData

__all__ = [
    "CIFAR10Data",
    "DigitsData",
    "HuggingFaceText",
    "ImageFolderData",
    "TextData",
    "TinyImageNetData",
]
