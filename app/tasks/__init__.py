"""LightningModules: what is learnt, and from which loss."""

from .image_classification import ImageClassification
from .language_modeling import LanguageModeling

__all__ = ["ImageClassification", "LanguageModeling"]
