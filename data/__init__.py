"""LightningDataModules, and what reads files into tensors."""

from .text import HuggingFaceText, TextData
from .vision import CIFAR10Data, DigitsData, ImageFolderData, TinyImageNetData

__all__ = [
    "CIFAR10Data",
    "DigitsData",
    "HuggingFaceText",
    "ImageFolderData",
    "TextData",
    "TinyImageNetData",
]
