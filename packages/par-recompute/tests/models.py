"""Small models as people write them: blocks of a GPT, a vision transformer and a Llama."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """One product for q, k and v, as in GPT and in vision transformers."""

    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.qkv(x).split(width, dim=-1)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """A block of GPT: seven modules without children."""

    def __init__(self, width=32, heads=4, causal=True):
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), Attention(width, heads, causal), nn.LayerNorm(width)
        self.fc, self.act, self.out = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.out(self.act(self.fc(self.ln2(x))))


LEAVES = ("ln1", "attn.qkv", "attn.proj", "ln2", "fc", "act", "out")


class GPT(nn.Module):
    def __init__(self, width=32, blocks=3, vocabulary=50, tokens=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.h = nn.ModuleList(Block(width) for _ in range(blocks))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class ViT(nn.Module):
    def __init__(self, width=32, blocks=2, patch=4, channels=3):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.blocks = nn.Sequential(*(Block(width, causal=False) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class RMSNorm(nn.Module):
    """As models write it by hand, in fp32 inside."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x, cos, sin):
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-other, one), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Separate q, k, v with fewer heads of keys, rotary positions given by the model, and a gated MLP."""

    def __init__(self, width=32, heads=4, keys=2, inner=48):
        super().__init__()
        self.heads, self.keys, size = heads, keys, width // heads
        self.input_norm, self.post_norm = RMSNorm(width), RMSNorm(width)
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, keys * size, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down, self.act = nn.Linear(inner, width, bias=False), nn.SiLU()

    def forward(self, x, cos, sin):
        batch, tokens, width = x.shape
        y = self.input_norm(x)
        projections = ((self.q_proj, self.heads), (self.k_proj, self.keys), (self.v_proj, self.keys))
        q, k, v = (proj(y).view(batch, tokens, heads, -1).transpose(1, 2) for proj, heads in projections)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        y = self.post_norm(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, width=32, blocks=2, vocabulary=50):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaBlock(width) for _ in range(blocks))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        angles = torch.arange(ids.shape[1])[:, None] / 100 ** (torch.arange(4) / 4)
        cos, sin = (f(angles).repeat(1, 2) for f in (torch.cos, torch.sin))
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos=cos, sin=sin)
        return self.head(self.norm(x))


def gpt():
    torch.manual_seed(0)
    return GPT(), torch.randint(50, (2, 15))


def vit():
    torch.manual_seed(0)
    return ViT(), torch.randn(2, 3, 12, 20)


def llama():
    torch.manual_seed(0)
    return Llama(), torch.randint(50, (2, 15))


MODELS = {"gpt": gpt, "vit": vit, "llama": llama}
