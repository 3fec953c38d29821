"""DeepSeek-V3's architecture for training: MLA, MoE without auxiliary loss, one MTP layer (arXiv:2412.19437).

Independent of the serving engine. Submodules carry the published names; `checkpoint` only has to unstack the experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from millrace_training.config import ModelConfig


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).to(x.dtype)


class Linear(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in) * gain * fan_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max_position_embeddings, qk_rope_head_dim / 2], float32."""
    width = config.qk_rope_head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x0, x1), (x2, x3), … of x [B, T, H, rope]; all first elements come first, in q and k alike."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """MLA (V3's equations 1-11) with expanded heads."""

    def __init__(self, config: ModelConfig, out_gain: float) -> None:
        super().__init__()
        self.config = config
        hidden, heads, eps = config.hidden_size, config.num_attention_heads, config.rms_norm_eps
        self.q_a_proj = Linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = RmsNorm(config.q_lora_rank, eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, eps)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = Linear(heads * config.v_head_dim, hidden, out_gain)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        batch, length, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(
            batch, length, c.num_attention_heads, c.qk_head_dim
        )
        q_nope, q_pe = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c_kv)).view(batch, length, c.num_attention_heads, -1)
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k_pe = rotate(k_pe.unsqueeze(2), cos, sin).expand(-1, -1, c.num_attention_heads, -1)
        q = torch.cat((q_nope, rotate(q_pe, cos, sin)), dim=-1).transpose(1, 2)
        k = torch.cat((k_nope, k_pe), dim=-1).transpose(1, 2)
        # The flash kernel wants one head size for q, k and v.
        v = F.pad(v, (0, c.qk_head_dim - c.v_head_dim)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.qk_head_dim**-0.5)
        return self.o_proj(out.transpose(1, 2)[..., : c.v_head_dim].reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int, out_gain: float) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden, out_gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Sigmoid gate with group-limited top-k and a correction bias that only the choice sees (V3's equations 12-16).

    `load` counts the tokens of each expert since the last `update_bias`, which moves the bias against the imbalance.
    """

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, config.hidden_size) * config.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, hidden] -> the weight of every expert for every token, [N, experts], zero where it was not chosen."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = self._choose(scores.detach() + self.e_score_correction_bias)
        if self.training:
            self.load += chosen.sum(0)
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    def _choose(self, biased: Tensor) -> Tensor:
        """[N, experts] of 0 and 1."""
        c = self.config
        grouped = biased.view(-1, c.n_group, c.n_routed_experts // c.n_group)
        best_groups = grouped.topk(2, dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
        in_group = torch.zeros_like(grouped[..., 0]).scatter(1, best_groups, 1.0)
        allowed = in_group[..., None].expand_as(grouped).reshape_as(biased) > 0
        best = biased.masked_fill(~allowed, float("-inf")).topk(c.num_experts_per_tok, dim=-1).indices
        return torch.zeros_like(biased).scatter(1, best, 1.0)

    @torch.no_grad()
    def update_bias(self, speed: float) -> Tensor:
        """Returns the largest load over the mean, a 0-dim tensor: 1 is perfect balance."""
        mean = self.load.mean()
        self.e_score_correction_bias += speed * torch.sign(mean - self.load)
        violation = self.load.max() / mean
        self.load.zero_()
        return violation


class Experts(nn.Module):
    """The routed experts, stacked. All run on every token: with a handful of narrow experts that is one wide MLP."""

    def __init__(self, config: ModelConfig, out_gain: float) -> None:
        super().__init__()
        count, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.randn(count, inner, hidden) * hidden**-0.5)
        self.up_proj = nn.Parameter(torch.randn(count, inner, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, inner) * out_gain * inner**-0.5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [N, hidden], weights [N, experts] -> [N, hidden]"""
        count, inner, _ = self.gate_proj.shape
        h = F.silu(F.linear(x, self.gate_proj.flatten(0, 1))) * F.linear(x, self.up_proj.flatten(0, 1))
        h = (h.view(-1, count, inner) * weights[..., None].to(h.dtype)).flatten(1)
        return F.linear(h, self.down_proj.transpose(0, 1).flatten(1))


class Moe(nn.Module):
    def __init__(self, config: ModelConfig, out_gain: float) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config, out_gain)
        shared = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = Mlp(config.hidden_size, shared, out_gain)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        return (self.experts(flat, self.gate(flat)) + self.shared_experts(flat)).view_as(x)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        out_gain = (2 * config.num_hidden_layers) ** -0.5  # the residual stream's variance does not grow with depth
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = Attention(config, out_gain)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = Moe(config, out_gain) if config.is_moe(layer) else Mlp(hidden, config.intermediate_size, out_gain)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Mtp(nn.Module):
    """One more decoder layer, for the token after the next (V3's equations 21-23); embedding and head are shared."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (RmsNorm(hidden, eps) for _ in range(3))
        self.eh_proj = Linear(2 * hidden, hidden)
        self.layer = DecoderLayer(config, config.num_hidden_layers)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """embedded [B, T, D] of t_{i+1} and the main model's normed hidden state at i -> the one for t_{i+2}."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.norm(self.layer(x, cos, sin))


class DeepseekV3(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.2)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, gain=0.5)
        self.mtp = Mtp(config)
        for name, table in zip(("cos", "sin"), rope_tables(config), strict=True):
            self.register_buffer(name, table, persistent=False)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> hidden states after the final norm, [B, T, D]."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self._embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def mtp_hidden(self, next_tokens: Tensor, hidden: Tensor) -> Tensor:
        """next_tokens [B, T] holds t_{i+1} beside `hidden` of t_i."""
        cos, sin = self.cos[: next_tokens.shape[1]], self.sin[: next_tokens.shape[1]]
        return self.mtp(self._embed(next_tokens), hidden, cos, sin)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, T] -> logits for the next token [B, T, V] and MTP's for the one after that [B, T - 1, V]."""
        hidden = self.hidden(tokens)
        return self.lm_head(hidden), self.lm_head(self.mtp_hidden(tokens[:, 1:], hidden[:, :-1]))

    def losses(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted mean cross entropies of the main model and of MTP.

        Args:
            tokens: [B, T + 2]
            weights: [B, T + 2], of each token as a target.
        """
        hidden = self.hidden(tokens[:, :-2])
        drafted = self.mtp_hidden(tokens[:, 1:-1], hidden)
        return (
            self._cross_entropy(hidden, tokens[:, 1:-1], weights[:, 1:-1]),
            self._cross_entropy(drafted, tokens[:, 2:], weights[:, 2:]),
        )

    def _cross_entropy(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        losses = F.cross_entropy(self.lm_head(hidden).flatten(0, 1).float(), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1)

    def gates(self) -> list[Gate]:
        return [module for module in self.modules() if isinstance(module, Gate)]
