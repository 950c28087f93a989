"""Text: what is read, how it is cut into tokens, and batches of it."""

from .module import HuggingFaceText, TextData

__all__ = ["HuggingFaceText", "TextData"]
