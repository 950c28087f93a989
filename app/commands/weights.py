"""`python -m app weights`: save a timm model's weights, for machines without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import timm
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..errors import ConfigError
from ..files import write_whole
from ..models.vit import read_weights
from .arguments import Parser


def main(argv: Sequence[str]) -> int:
    """Writes the weights of a timm model to a file that `model.network.pretrained` takes.

    Raises:
        ConfigError: for a model that timm does not have, weights that can't be downloaded, or a
            file that can't be written.
    """
    parser = Parser(
        prog="python -m app weights",
        description="Save a timm model's weights to a file; give it to --model.network.pretrained.",
    )
    parser.add_argument("model", help="a timm model, as vit_small_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--out", type=Path, required=True, help="the file, .safetensors")
    parser.add_argument(
        "--random", action="store_true", help="random weights, to rehearse without a network"
    )
    options = parser.parse_args(list(argv))
    if options.out.suffix != ".safetensors":
        raise ConfigError(f"out: {options.out} must end in .safetensors")
    if not timm.is_model(options.model.split(".")[0]):
        raise ConfigError(f"model: timm has no model {options.model}")
    if options.random:
        weights = timm.create_model(options.model).state_dict()
    else:
        try:
            weights = read_weights(options.model)
        except ValueError as error:
            raise ConfigError(str(error).removeprefix("pretrained: ")) from error
    tensors = {key: value.contiguous() for key, value in weights.items()}
    try:
        write_whole(options.out, lambda file: save_file(tensors, file))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"out: cannot write {options.out} ({error})") from error
    kind = "random" if options.random else "pretrained"
    print(f"wrote {kind} weights of {options.model}: {options.out}")
    return 0
