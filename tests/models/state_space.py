"""A language model of selective state spaces, its scan a loop in a method of its own."""

import torch
import torch.nn.functional as F
from torch import nn


class StateSpace(nn.Module):
    def __init__(self, width, states=4, rank=2, kernel=3):
        super().__init__()
        self.inner, self.states, self.rank = 2 * width, states, rank
        self.enter = nn.Linear(width, 2 * self.inner, bias=False)
        self.conv = nn.Conv1d(self.inner, self.inner, kernel, groups=self.inner, padding=kernel - 1)
        self.select = nn.Linear(self.inner, rank + 2 * states, bias=False)
        self.step = nn.Linear(rank, self.inner)
        self.log_decay = nn.Parameter(
            torch.log(torch.arange(1.0, states + 1).repeat(self.inner, 1))
        )
        self.skip = nn.Parameter(torch.ones(self.inner))
        self.leave = nn.Linear(self.inner, width, bias=False)

    def forward(self, x):
        length = x.shape[1]
        x, gate = self.enter(x).split([self.inner, self.inner], dim=-1)
        x = self.conv(x.transpose(1, 2))[:, :, :length].transpose(1, 2)
        y = self.scan(F.silu(x))
        return self.leave(y * F.silu(gate))

    def scan(self, x):
        chosen = self.select(x)
        step, write, read = chosen.split([self.rank, self.states, self.states], dim=-1)
        step = F.softplus(self.step(step))
        decay = torch.exp(torch.einsum("bld,dn->bldn", step, -torch.exp(self.log_decay)))
        written = torch.einsum("bld,bln,bld->bldn", step, write, x)
        state = torch.zeros(x.shape[0], *self.log_decay.shape, dtype=x.dtype, device=x.device)
        out = []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + written[:, t]
            out.append(torch.einsum("bdn,bn->bd", state, read[:, t]))
        return torch.stack(out, dim=1) + x * self.skip


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixer = StateSpace(width)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class Model(nn.Module):
    def __init__(self, words=61, width=16, depth=3):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).transpose(1, 2), targets)
