"""Text generation from a causal model, token by token.

Shape legend: V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    network: Any,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    vocab_size: int | None = None,
    context: int | None = None,
) -> Iterator[int]:
    """Continue a prompt.

    Keys and values are cached. When the context is full, generation goes on from its later half:
    the cost of a token stays the same, and the model never sees a longer sequence than in training.

    Args:
        network: a Decoder or an HFCausalLM, put into evaluation mode while the iterator is in use.
        prompt: at least one token id; only the last `context` of them count.
        max_tokens: tokens to generate at most.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: sample among the `top_k` most probable tokens.
        top_p: sample among the fewest most probable tokens whose probabilities sum to `top_p`
            (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751).
        seed: of the sampling; torch's global random state is left alone.
        stop: id that ends the text; it is not yielded.
        vocab_size: sample among the first `vocab_size` ids, where the model has more of them.
        context: longest sequence to feed; None for the model's `max_length`.

    Yields:
        Token ids.

    Raises:
        ValueError: an empty prompt.
    """
    if not len(prompt):
        raise ValueError("the prompt has no token")
    context = min(network.max_length, context or network.max_length)
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    was_training = network.training
    network.eval()
    try:
        ids = [int(i) for i in prompt][-context:]
        cache, new = network.new_cache(), ids
        for _ in range(max_tokens):
            if cache.length + len(new) > context:
                cache, new = network.new_cache(), ids[-max(1, context // 2) :]
            logits_V = network(torch.tensor([new], device=device), cache)[0, -1, :vocab_size]
            token = sample(logits_V, temperature, top_k, top_p, generator)
            if token == stop:
                return
            yield token
            ids, new = [*ids[1 - context :], token] if context > 1 else [token], [token]
    finally:
        network.train(was_training)


def sample(
    logits_V: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> int:
    """Draw one token id from the logits; the arguments are those of `generate`."""
    if temperature == 0:
        return int(logits_V.argmax())
    # The maximum first: a division by a tiny temperature then gives -inf, never inf.
    scaled_V = (logits_V.float() - logits_V.max().float()) / temperature
    p_V, id_V = scaled_V.softmax(0).sort(descending=True)
    if top_k is not None:
        p_V = p_V[:top_k] / p_V[:top_k].sum()
    if top_p is not None:
        # Keep a token while the sum before it is below top_p, and always the first one.
        kept_V = p_V.cumsum(0) - p_V < top_p
        kept_V[0] = True
        p_V = p_V * kept_V
    return int(id_V[torch.multinomial(p_V, 1, generator=generator)])
