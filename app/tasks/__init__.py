"""LightningModules: what is learnt, and from which loss; and how they are sharded."""

from .image_classification import ImageClassification
from .language_modeling import LanguageModeling
from .sharding import FSDP2

__all__ = ["FSDP2", "ImageClassification", "LanguageModeling"]
