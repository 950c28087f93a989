"""LightningDataModules, and what reads files into tensors."""

from .images import CIFAR10Data, DigitsData, ImageData, ImageFolderData, TinyImageNetData
from .text import HuggingFaceText, TextData

__all__ = [
    "CIFAR10Data",
    "DigitsData",
    "HuggingFaceText",
    "ImageData",
    "ImageFolderData",
    "TextData",
    "TinyImageNetData",
]
