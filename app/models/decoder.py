"""A causal language model of the Llama family whose feed-forward layers may be MoE blocks.

Pre-norm blocks with RMSNorm, rotary positions, grouped-query attention and SwiGLU. The layers are
named as in timm's Vision Transformer: `blocks.<i>.mlp` is the feed-forward or the MoE block.

Shape legend: B batch, S sequence, P positions held by the cache (S included), V vocabulary,
D model width, F hidden width, H query heads, G key/value heads, C channels of one head.
"""

import math
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..moe import MoEBlock, SwiGLUExperts


class KVCache:
    """Keys and values of the positions seen so far, for one batch of sequences.

    Made by `Decoder.new_cache`. `length` positions are filled; a forward pass appends to them.
    """

    def __init__(
        self,
        depth: int,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (depth, batch_size, num_kv_heads, max_length, head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k_BGSC: Tensor, v_BGSC: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; returns all of them so far, [B, G, P, C] each."""
        end = self.length + k_BGSC.shape[2]
        self.keys[layer, :, :, self.length : end] = k_BGSC
        self.values[layer, :, :, self.length : end] = v_BGSC
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.

    Args:
        dim: model width D.
        num_heads: query heads H; D must be a multiple of it.
        num_kv_heads: key/value heads G; H must be a multiple of it.
        dropout: of the attention weights, while training.
    """

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, dropout: float) -> None:
        super().__init__()
        if dim % (2 * num_heads) or num_heads % num_kv_heads:
            raise ValueError(
                f"dim {dim} must be an even multiple of num_heads {num_heads}, and num_heads a "
                f"multiple of num_kv_heads {num_kv_heads}"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim // num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x_BSD: Tensor, rope_2SC: Tensor, cache: KVCache | None = None, layer: int = 0
    ) -> Tensor:
        """Attention output [B, S, D] for `x_BSD` at the positions that `rope_2SC` stands for."""
        B, S, _ = x_BSD.shape
        H, G = self.num_heads, self.num_kv_heads
        heads = self.qkv(x_BSD).view(B, S, H + 2 * G, self.head_dim).transpose(1, 2)
        qk_BHSC, v_BGSC = heads.split((H + G, G), dim=1)
        q_BHSC, k_BGSC = rotate(qk_BHSC, rope_2SC).split((H, G), dim=1)
        mask_SP = None
        if cache is not None:
            k_BGSC, v_BGSC = cache.append(layer, k_BGSC, v_BGSC)
            if S > 1 and cache.length:  # a later piece of a sequence: offset causal mask
                ones_SP = x_BSD.new_ones(S, cache.length + S, dtype=torch.bool)
                mask_SP = ones_SP.tril(cache.length)
        y_BHSC = F.scaled_dot_product_attention(
            q_BHSC,
            k_BGSC,
            v_BGSC,
            attn_mask=mask_SP,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask_SP is None and S > 1,
            enable_gqa=G != H,
        )
        return self.out(y_BHSC.transpose(1, 2).reshape(B, S, -1))


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer 2020, arXiv 2002.05202): down(silu(gate x) * up x)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(
        self, dim: int, attention: Attention, mlp: nn.Module, norm_eps: float, dropout: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=norm_eps)
        self.attn = attention
        self.norm2 = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor, rope_2SC: Tensor, cache: KVCache | None, layer: int) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        x_BSD = x_BSD + self.dropout(self.attn(self.norm1(x_BSD), rope_2SC, cache, layer))
        return x_BSD + self.dropout(self.mlp(self.norm2(x_BSD)))


def swiglu_moe(dim: int, hidden: int) -> MoEBlock:
    """An MoE block with its defaults and SwiGLU experts, as the dense layers of this model."""
    return MoEBlock(dim, hidden, experts=SwiGLUExperts)


class Decoder(nn.Module):
    """Causal decoder: token ids to the logits of each next token.

    Args:
        vocab_size: number of token ids V.
        dim: model width D.
        depth: number of blocks.
        num_heads: query heads H.
        num_kv_heads: key/value heads G; None for as many as query heads.
        hidden: hidden width F of the feed-forward layers; None for 8/3 of `dim`, rounded up to a
            multiple of 32 (the parameters of a two-layer feed-forward of width 4 D).
        max_length: longest sequence, prompt and generated tokens together. The default is the
            default `block_size` of the text data.
        rope_theta: base of the rotary frequencies (Su et al. 2021, arXiv 2104.09864).
        norm_eps: epsilon of the RMSNorms.
        tie_embeddings: the output projection is the token embedding.
        dropout: of the attention weights and of each residual branch.
        moe: the MoE block; called with (dim, hidden).
        moe_blocks: which blocks' feed-forward is replaced, counted from 0; [] for a dense model.

    Weights start normal with standard deviation 0.02, what is added to the residual stream (the
    attention's output and every `down` projection, experts included) scaled by 1 / sqrt(2 depth),
    as in GPT-2. Dense weights of `transformers`' Llama fit: see `rename_llama_weights`.

    Raises:
        ValueError: sizes that do not fit together, or a position in `moe_blocks` outside the model.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        hidden: int | None = None,
        max_length: int = 128,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
        dropout: float = 0.0,
        moe: Callable[[int, int], nn.Module] = swiglu_moe,
        moe_blocks: list[int] | tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden = 32 * math.ceil(8 * dim / 3 / 32) if hidden is None else hidden
        outside = [i for i in moe_blocks if not 0 <= i < depth]
        if outside:
            raise ValueError(f"moe_blocks {outside} are not among the {depth} blocks, from 0")
        self.vocab_size, self.max_length, self.rope_theta = vocab_size, max_length, rope_theta
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(
            Block(
                dim,
                Attention(dim, num_heads, num_kv_heads, dropout),
                moe(dim, hidden) if i in moe_blocks else SwiGLU(dim, hidden),
                norm_eps,
                dropout,
            )
            for i in range(depth)
        )
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self._initialise(moe_blocks)
        if tie_embeddings:
            self.head.weight = self.embed.weight

    @torch.no_grad()
    def _initialise(self, moe_blocks: Collection[int]) -> None:
        ours = [m for i, b in enumerate(self.blocks) for m in _dense_layers(b, i in moe_blocks)]
        for layer in (self.embed, self.head, *ours):
            nn.init.normal_(layer.weight, std=0.02)
        # By name, so that it reaches the stacked weights of the experts as well.
        for name, weight in self.blocks.named_parameters():
            if ".attn.out." in name or "down" in name.split("."):
                weight.mul_((2 * len(self.blocks)) ** -0.5)

    def new_cache(self, batch_size: int = 1) -> KVCache:
        """An empty key/value cache for `batch_size` sequences of at most `max_length` tokens."""
        attention, weight = self.blocks[0].attn, self.embed.weight
        return KVCache(
            len(self.blocks),
            batch_size,
            attention.num_kv_heads,
            self.max_length,
            attention.head_dim,
            weight.device,
            weight.dtype,
        )

    def forward(self, tokens_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits of the token after each position.

        Args:
            tokens_BS: token ids.
            cache: keys and values of earlier positions, which `tokens_BS` then continues.

        Returns:
            logits_BSV: row s depends on tokens 0 to s only.

        Raises:
            ValueError: more than `max_length` positions in all.
        """
        start = 0 if cache is None else cache.length
        end = start + tokens_BS.shape[1]
        if end > self.max_length:
            raise ValueError(
                f"a sequence of {end} tokens is longer than the model's max_length "
                f"{self.max_length}; raise max_length or shorten the blocks of text"
            )
        x_BSD = self.embed(tokens_BS)
        rope_2SC = self._rope(start, end, x_BSD.device)
        for layer, block in enumerate(self.blocks):
            x_BSD = block(x_BSD, rope_2SC, cache, layer)
        if cache is not None:
            cache.length = end
        return self.head(self.norm(x_BSD))

    def _rope(self, start: int, end: int, device: torch.device) -> Tensor:
        """Cosines and sines, [2, S, C], of the positions `start` to `end` - 1, in float32."""
        C = self.blocks[0].attn.head_dim
        channel = torch.arange(0, C, 2, device=device, dtype=torch.float32)
        position_S = torch.arange(start, end, device=device, dtype=torch.float32)
        angle = torch.outer(position_S, self.rope_theta ** (-channel / C)).repeat(1, 2)
        return torch.stack((angle.cos(), angle.sin()))


def rotate(x_BHSC: Tensor, rope_2SC: Tensor) -> Tensor:
    """Rotate channel pairs (c, c + C/2) by their position's angle, in float32 (RoFormer eq. 34)."""
    cos_SC, sin_SC = rope_2SC
    left, right = x_BHSC.float().chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return (x_BHSC * cos_SC + turned * sin_SC).to(x_BHSC.dtype)


def rename_llama_weights(llama: dict[str, Tensor]) -> dict[str, Tensor]:
    """Dense weights of `transformers`' LlamaForCausalLM under the names of `Decoder`.

    Args:
        llama: its `state_dict()`, with tied embeddings present under both names or one.

    Returns:
        A state for `Decoder.load_state_dict`; query, key and value projections are joined, all
        other weights are the same tensors.
    """
    names = {
        "self_attn.o_proj": "attn.out",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
    }
    embedding = llama["model.embed_tokens.weight"]
    state = {
        "embed.weight": embedding,
        "norm.weight": llama["model.norm.weight"],
        "head.weight": llama.get("lm_head.weight", embedding),
    }
    depth = 1 + max(int(k.split(".")[2]) for k in llama if k.startswith("model.layers."))
    for i in range(depth):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        qkv = [llama[f"{theirs}.self_attn.{part}_proj.weight"] for part in "qkv"]
        state[f"{ours}.attn.qkv.weight"] = torch.cat(qkv)
        for old, new in names.items():
            state[f"{ours}.{new}.weight"] = llama[f"{theirs}.{old}.weight"]
    return state


def _dense_layers(block: Block, is_moe: bool) -> list[nn.Linear]:
    """A block's linear layers that are ours to initialise: an MoE block initialises its own."""
    part = block.attn if is_moe else block
    return [module for module in part.modules() if isinstance(module, nn.Linear)]
