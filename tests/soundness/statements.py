"""Statements that people write, or might, about a value `h` with three axes.

`{d}` is an axis, `{n}` a small number, `{w}` the size of the last axis. Names that are not bound
here are defined by what stands around (`ops.NAMES`). A line that begins with `init:` stands in
`__init__`, one with `top:` at the top of the file, one with `def:` among the methods, one with `net:` in the
module around, after the call. `shard:` and `own:` say what is split as well: a layer or a
parameter, an axis; `arg:` is a further argument.
"""

from __future__ import annotations

STATEMENTS = tuple(
    text.strip("\n")
    for text in """
h = h * h.size(-1)
h = h * h.shape[-1] ** -0.5
h = h / math.sqrt(h.size(-1))
h = h + torch.tensor(h.size(-1))
h = h + h.new_tensor(h.size(-1))
h = h * torch.full((1,), h.size(-1))
h = torch.full_like(h, h.size(-1)) + h
h = h * h.new_full((1,), h.shape[{d}])
h = h.subtract(h.size({d}))
h = h.multiply(h.shape[{d}])
h = torch.divide(h, h.size({d}))
h = torch.mul(h, h.size({d}))
h = torch.add(h, y, alpha=h.size({d}))
h = F.elu(h, h.size(-1))
h = F.softplus(h, beta=h.size(-1))
h = F.hardtanh(h, -1, h.size(-1))
h = F.leaky_relu(h, 1 / h.size(-1))
h = torch.lerp(h, y, h.size(-1))
h = torch.addcmul(h, h, y, value=h.size(-1))
h = h.clamp(max=h.size(-1) / 12)
h = h.clamp(-1 / h.size({d}), 1.0)
h = h.pow(h.size(-1) // 8)
h = h * len(h)
h = h * len(h[0, 0])
h = h * h.numel()
h = h / h.nelement()
h = h * float(h.size({d}))
h = h * (h.size(-1) > {n})
h = h * int(h.size({d}) // 2)
h = h * max(h.size(-1), 20)
h = h * sum(h.shape)
h = h * math.prod(h.shape)
h = h * h.shape.numel()
h = h * torch.Size(h.shape[1:]).numel()
b, s, e = h.shape; h = h * (e / 24)
b, s, e = h.size(); h = h.reshape(b * s, e).view(b, s, e) * (s / 12)
*rest, e = h.shape; h = h.view(*rest, e) / e
h = h * torch.arange(h.size(-1))
h = h * torch.arange(h.size({d})).sum()
h = h + torch.linspace(0, 1, h.size(-1))
h = h + torch.arange(h.shape[-1], dtype=h.dtype).cos()
h = h * torch.ones(h.size(-1))
h = h * torch.ones_like(h).sum()
h = h * torch.ones_like(h).cumsum({d})
h = h + torch.zeros_like(h).add(1.0).sum({d}, keepdim=True)
h = h * torch.ones(h.shape).mean({d}, keepdim=True)
h = h * torch.ones_like(h[0, 0]).norm()
h = h * h.new_ones(h.shape).sum(-1, keepdim=True)
h = h * torch.eye(h.size(-1)).sum()
h = h @ torch.eye(h.size(-1))
h = h @ torch.ones(h.size(-1), h.size(-1))
h = h * torch.tril(torch.ones(h.size(1), h.size(-1)))
h = h.masked_fill(torch.triu(torch.ones(h.size(1), h.size(2)), 1).bool(), 0.0)
h = h * F.one_hot(torch.tensor(3), h.size(-1))
h = h * (torch.arange(h.size(-1)) < {n})
h = h[..., torch.arange(h.size(-1) - 1, -1, -1)]
h = h[..., torch.randperm(1)] + h
h[..., :4] = 0
h[..., 0] = 1.0
h[:, :, [0, 3]] = 0
h[:, 0] = 1.0
h[0] = 0.0
h[:, 1:3] = h[:, 3:5]
h[..., -1] = h[..., 0]
h[..., {n}:] = 0
h[:, {n}:] *= 2
h[..., ::2] = 0
h[..., 1::2] += 1.0
h[{n} % 3] += 1
h[h > 0] = 0
h[h > 0] *= 2
h[..., i] = 0.5
h[:, i] = 0.5
h[m.expand_as(h)] = 0.0
h[m.squeeze(-1)] = 0.0
h = h[..., :{n}]
h = h[..., {n}:]
h = h[:, {n}:]
h = h[:, ::2]
h = h[..., ::2]
h = h[..., -1:] + h
h = h[..., :1] * h
h = h[:, -1:] * h
h = h[:, :1].expand_as(h) + h
h = h[..., 0].unsqueeze(-1) + h
h = h[..., i].sum(-1, keepdim=True) + h
h = h[:, i].sum(1, keepdim=True) + h
h = h[..., None, :].squeeze(-2)
h = h[[0, 1]]
h = h[i % 3]
h = h[0] + h
h = h[torch.tensor([0, 2])]
h = h[:, :, torch.tensor([0, 3])].mean(-1, keepdim=True) * h
h = h.flip({d})
h = h.roll(1, {d})
h = h.roll(1)
h = h.roll({n}, dims={d})
h = torch.roll(h, shifts=(1, 2), dims=({d}, 1))
h = h.softmax({d})
h = h.log_softmax({d})
h = F.softmax(h, dim={d}) * h
h = h - h.mean({d}, keepdim=True)
h = h / h.std({d}, keepdim=True)
h = (h - h.mean({d}, keepdim=True)) / (h.var({d}, keepdim=True) + 1e-5).sqrt()
h = h / h.norm(dim={d}, keepdim=True)
h = h / h.abs().amax({d}, keepdim=True)
h = h / h.square().sum({d}, keepdim=True).add(1).sqrt()
h = F.normalize(h, dim={d})
h = F.layer_norm(h, h.shape[-1:])
h = F.layer_norm(h, (h.size(-1),))
h = F.rms_norm(h, (h.size(-1),))
h = F.group_norm(h.mT, 4).mT
h = F.instance_norm(h)
h = F.instance_norm(h.mT).mT
h = h * h.sum()
h = h + h.mean()
h = h * h.max()
h = h - h.max({d}, keepdim=True).values
h = h - h.max({d}, keepdim=True)[0]
h = h / h.norm()
h = h * h.square().mean().sqrt()
h = h + h.sum({d}, keepdim=True)
h = h.cumsum({d})
h = h.sort({d}).values
h = h.sort({d})[0]
h = h.gather(-1, h.argsort(-1))
h = h.topk(4, {d}).values.sum({d}, keepdim=True) + h
h = h * h.argmax({d}, keepdim=True)
h = torch.where(h > h.mean(), h, 0.0)
h = torch.where(h > 0, h, y)
h = torch.where(m, h, 0.0)
h = torch.where(m, h, 1.0)
h = torch.where(m, h, x.mean())
h = h.where(m, y)
h = h.masked_fill(m, 0.0)
h = h.masked_fill(m, 2.0)
h = h.masked_fill(h < 0, {n})
h = h * m
h = h * ~m
h = h + m
h = h * m.float()
h = h + x.mean()
h = h + c
h = h * c
h = c * h + c
h = c - h
h = c / (h.abs() + 1)
h = h + self.scalar
h = h * self.scalar
h = h * self.scalar.exp() + y
h = h + v
h = h * v
h = h * (1 + v)
h = torch.addcmul(v, h, y)
h = v + h
h = h + self.buffer
h = h * self.buffer
h = h + 1
h = 1 - h
h = h + torch.arange({w})
h = h * torch.arange({w})
h = h + torch.tensor([1.0] * {w})
h = h + torch.ones({w})
h = h * {n}
h = -h
h = +h
h = abs(h)
h = h ** 2
h = 2 ** h
h = h % 2
h = h // 1
h = h @ h.mT @ h
h = h @ t.mT @ t
h = torch.bmm(h, h.mT) @ h
h = torch.matmul(h.mT, h)
h = torch.einsum("bsd,btd->bst", h, y) @ h
h = torch.einsum("bsd,bse->bde", h, y)
h = torch.einsum("bsd,d->bs", h, v).unsqueeze(-1) * h
h = torch.einsum("bsd,ed->bse", h, t) @ t
h = torch.einsum("bsd->bds", h).mT
h = torch.einsum("bsd->bs", h).unsqueeze(-1) + h
h = torch.einsum("...d,...d->...", h, y)[..., None] * h
h = torch.tensordot(h, t, ([2], [1])) @ t
h = torch.tensordot(h, v, 1).unsqueeze(-1) * h
h = torch.inner(h, v).unsqueeze(-1) * h
h = torch.mv(h[0], v)[:, None] * h
h = torch.dot(h[0, 0], v) * h
h = torch.outer(h[0, 0], v)
h = torch.vdot(h.flatten(), y.flatten()) * h
h = torch.kron(h[0], torch.ones(1, 2))
h = F.linear(h, t) @ t
h = F.linear(h, t, t[:, 0])
h = F.linear(h, t.mT @ t, v)
h = F.bilinear(h, y, torch.ones(2, {w}, {w}))
h = F.conv1d(h.mT, torch.ones({w}, 1, 3), padding=1, groups={w}).mT
h = F.conv1d(h.mT, torch.ones(5, {w}, 1)).mT @ t
h = F.conv1d(h, torch.ones(12, 12, 3), padding=1)
h = F.conv1d(h, torch.ones(12, 12, 1))
h = F.avg_pool1d(h, 3, 1, 1)
h = F.avg_pool1d(h.mT, 3, 1, 1).mT
h = F.max_pool1d(h.mT, 3, 1, 1).mT
h = F.adaptive_avg_pool1d(h, {w})
h = F.interpolate(h, scale_factor=1.0)
h = F.interpolate(h.mT, h.size(1)).mT
h = F.pad(h, (1, 1), value=1.0)
h = F.pad(h, (1, 0))[..., :-1]
h = F.pad(h, (0, 0, 1, 0))[:, :-1]
h = F.pad(h, (0, 0, 1, 0), value=1.0)[:, :-1]
h = F.pad(h, (0, 0, 0, 0, 1, 0))
h = F.pad(h, (0, 24 - h.size(-1)))
h = torch.cat([h, y], -1)
h = torch.cat([h, y], 1)
h = torch.cat([h, y], {d})
h = torch.cat([h, y], -1)[..., :{w}]
h = torch.cat([y, h], -1).chunk(2, -1)[0]
h = torch.cat([h[..., {n}:], h[..., :{n}]], -1)
h = torch.cat([h[:, 1:], h[:, :1]], 1)
h = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
h = torch.cat([torch.ones_like(h[:, :1]), h], 1)
h = torch.cat([torch.zeros(h.size(0), 1, h.size(-1)), h], 1)
h = torch.cat([x[..., :1].expand(-1, -1, h.size(-1)), h], 1)
h = torch.cat([self.cls.expand(h.size(0), 1, {w}), h], 1)
h = torch.cat([self.cls.expand(h.size(0), -1, -1), h], dim=1)[:, 1:]
h = torch.cat([v.view(1, 1, -1).expand(h.size(0), 1, -1), h], 1)
h = torch.stack([h, y]).sum(0)
h = torch.stack([h, y], -1).mean(-1)
h = torch.stack([h, y], -1).flatten(-2)
h = torch.stack([h, y], -2).flatten(-2)
h = torch.stack([h, y], 2).transpose(2, 3).flatten(2)
h = torch.stack([h, c.expand_as(h)]).prod(0)
h = torch.stack([h, torch.ones_like(h)]).sum(0)
h = torch.hstack([h, y])
h = torch.dstack([h, y])
h = torch.vstack([h, h])
h = torch.block_diag(h[0], y[0])
h = torch.cartesian_prod(h[0, 0], h[0, 1])
a, b = h.chunk(2, -1); h = torch.cat([b, a], -1)
a, b = h.chunk(2, -1); h = torch.cat([-b, a], -1) * y + h
a, b = h.chunk(2, {d}); h = a * b
a, b = h.split(h.size(-1) // 2, -1); h = torch.cat([a.sigmoid() * b, b], -1)
a, b = h[..., ::2], h[..., 1::2]; h = torch.stack([-b, a], -1).flatten(-2)
a, b, k = h.tensor_split(3, -1); h = torch.cat([k, b, a], -1)
a, b = h.split([h.size(-1) - 4, 4], -1); h = torch.cat([a, b * 2], -1)
a, *_ = h.unbind(1); h = a.unsqueeze(1) + h
a, *_ = h.unbind(-1); h = a.unsqueeze(-1) + h
h = h.unflatten(-1, (12, -1)).softmax(-1).flatten(-2)
h = h.unflatten(-1, (-1, 2)).softmax(-1).flatten(-2)
h = h.unflatten(-1, (12, -1)).softmax(-2).flatten(-2)
h = h.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
h = h.unflatten(-1, (12, 2)).transpose(-1, -2).flatten(-2)
h = h.unflatten(-1, (2, -1)).transpose(-1, -2).reshape(h.shape)
h = h.view(*h.shape[:-1], 12, -1).mean(-1)
h = h.view(*h.shape[:-1], -1, 2).mean(-1, keepdim=True).expand(*h.shape[:-1], -1, 2).flatten(-2)
h = h.view(h.size(0), -1).view(h.shape)
h = h.view(-1, h.size(-1)).view(h.shape)
h = h.view(h.size(0), h.size(1), 12, -1).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2)
h = h.view(h.size(0), h.size(1), 12, -1).transpose(1, 2).softmax(1).transpose(1, 2).flatten(2)
h = h.view(h.size(0), h.size(1), 12, -1).mT.reshape(h.shape)
h = h.view(h.size(0), -1, h.size(1)).mT
h = h.view(-1).view(h.shape)
h = h.reshape(-1, 2).softmax(-1).view(h.shape)
h = h.reshape(h.size(0), -1).softmax(-1).view(h.shape)
h = h.flatten(1).view(h.shape)
h = h.flatten().sort().values.view(h.shape)
h = h.flatten(1).mean(-1).view(-1, 1, 1) * h
h = h.transpose(1, 2).contiguous().view(h.shape)
h = h.transpose(0, 1).transpose(0, 1)
h = h.mT.softmax(-1).mT
h = h.mT.softmax(1).mT
h = h.permute(2, 0, 1).flip(0).permute(1, 2, 0)
h = h.movedim(-1, 0).cumsum(0).movedim(0, -1)
h = h.swapaxes(1, 2).sigmoid().swapaxes(1, 2)
h = h.T.permute(2, 1, 0)
h = h.unsqueeze(-1).expand(*h.shape, 2).flatten(-2)
h = h.unsqueeze(-2).expand(-1, -1, 2, -1).flatten(-2)
h = h.repeat(1, 1, 2)
h = h.repeat(1, 1, 2)[..., :{w}]
h = h.repeat(1, 2, 1)
h = h.repeat_interleave(2, -1)
h = h.repeat_interleave(2, 1)
h = h.repeat_interleave(2, -1).view(*h.shape[:2], -1, 2).sum(-1)
h = h.tile(2)
h = h.tile(1, 1, 2).view(*h.shape[:2], 2, -1).sum(-2)
h = h.expand(2, *h.shape).sum(0)
h = h.expand_as(y)
h = h.view_as(y)
h = h.reshape_as(y) + y
h = h.unfold(-1, 2, 2).sum(-1)
h = h.unfold(1, 2, 2).sum(-1)
h = h.as_strided(h.size(), h.stride())
h = torch.as_strided(h, (3, 12, 12), (h.stride(0), h.stride(1), 2)).repeat_interleave(2, -1)
h = h.narrow(-1, 0, 12).repeat(1, 1, 2)
h = h.narrow(1, 0, 12)
h = h.select(-1, 0).unsqueeze(-1) * h
h = h.select(1, 3).unsqueeze(1) * h
h = h.index_select(-1, i)
h = h.index_select(1, i)
h = h.index_select({d}, i % 3).sum({d}, keepdim=True) + h
h = h.take_along_dim(g, {d})
h = h.gather({d}, g)
h = h.scatter({d}, g, 0.5)
h = h.scatter_add({d}, g, y)
h = h.index_add({d}, i % 3, h.index_select({d}, i % 3))
h = h.index_fill({d}, i % 3, 0.5)
h = h.index_copy({d}, i, h.index_select({d}, i.flip(0)))
h = torch.index_put(h, (i % 3,), h[i % 3] * 2)
h = torch.take(h, i).sum() + h
h = torch.tril(h)
h = torch.triu(h, 1)
h = torch.diagonal(h, 0, 1, 2).sum() + h
h = torch.diag_embed(h).sum(-1)
h = torch.trace(h[0]) + h
h = torch.cdist(h, y) @ y
h = torch.cdist(h, y, p=1).sum(-1, keepdim=True) * h
h = torch.dist(h, y) * h
h = torch.cov(h[0]).sum() + h
h = torch.corrcoef(h[0])[0, 1] + h
h = F.cosine_similarity(h, y, dim={d}).unsqueeze({d}) * h
h = F.pairwise_distance(h, y).unsqueeze(-1) * h
h = F.glu(h, -1)
h = F.glu(torch.cat([h, y], -1), -1)
h = F.glu(torch.stack([h, y], -1).flatten(-2), -1)
h = F.dropout(h, 0.0, self.training)
h = F.dropout(h, 0.5, False)
h = F.prelu(h.mT, v).mT
h = F.threshold(h, 0.1, h.size(-1))
h = F.scaled_dot_product_attention(h, y, h)
h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
h = F.scaled_dot_product_attention(h.mT, y.mT, h.mT).mT
h = F.scaled_dot_product_attention(*(z.unflatten(-1, (12, -1)).transpose(1, 2) for z in (h, y, h))).transpose(1, 2).flatten(2)
h = F.scaled_dot_product_attention(*(z.unflatten(-1, (-1, 2)).transpose(1, 2) for z in (h, y, h))).transpose(1, 2).flatten(2)
h = F.scaled_dot_product_attention(*(z.unflatten(-1, (12, -1)) for z in (h, y, h))).flatten(2)
h = F.cross_entropy(h.mT, k, reduction="none").unsqueeze(-1) * h
h = F.cross_entropy(h.flatten(0, 1), k.flatten()) * h
h = F.nll_loss(h.log_softmax(-1).flatten(0, 1), k.flatten()) + h
h = F.kl_div(h.log_softmax(-1), y.softmax(-1), reduction="sum") * h
h = F.mse_loss(h, y) * h
h = F.l1_loss(h, y, reduction="sum") * h
h = F.smooth_l1_loss(h, y) + h
h = F.huber_loss(h, y, reduction="none") + h
h = F.soft_margin_loss(h, y.sign()) * h
h = F.binary_cross_entropy_with_logits(h, y.sigmoid()) * h
h = F.hinge_embedding_loss(h, y.sign(), reduction="mean") * h
h = torch.fft.fft(h).real
h = torch.fft.rfft(h, dim=1).abs().sum(1, keepdim=True) * h
h = torch.special.softmax(h, {d})
h = torch.special.logsumexp(h, {d}).unsqueeze({d}) + h
h = torch.logsumexp(h, {d}, keepdim=True) + h
h = torch.vmap(lambda z: z * 2)(h)
h = torch.vmap(lambda z: z.softmax(-1))(h)
h = torch.vmap(lambda z: z.softmax(0), in_dims=-1, out_dims=-1)(h)
h = torch.vmap(torch.sum)(h).view(-1, 1, 1) * h
h = torch.func.vmap(lambda z, u: z + u, (2, 2), 2)(h, y)
h = torch.func.grad(lambda z: z.square().sum())(h)
h = torch.func.grad(lambda z: z.softmax(-1).square().sum())(h)
h = torch.func.jvp(torch.tanh, (h,), (y,))[1]
h = torch.autograd.grad(h.square().sum(), h, create_graph=True)[0] if self.training else h * 2
h = torch.utils.checkpoint.checkpoint(torch.tanh, h, use_reentrant=False)
h = torch.utils.checkpoint.checkpoint(lambda z: z.softmax(-1), h, use_reentrant=False)
h = torch.utils.checkpoint.checkpoint(lambda z: z * c, h, use_reentrant=False)
h = torch.nested.nested_tensor([h[0], h[1]]).to_padded_tensor(0.0)
h = scripted(h)↵top:@torch.jit.script↵top:def scripted(h):↵top:    return h.softmax(-1)
h = scripted(h)↵top:@torch.jit.script↵top:def scripted(h):↵top:    return h.tanh() * 2
h = scripted(h)↵top:@torch.jit.script↵top:def scripted(h):↵top:    return h + h.sum(-1, keepdim=True)
h = Gate.apply(h, c)↵{gate}
h = Gate.apply(h, self.scalar)↵{gate}
h = Gate.apply(h, y)↵{gate}
h = Gate.apply(h, v)↵{gate}
h = Soft.apply(h)↵top:class Soft(torch.autograd.Function):↵top:    @staticmethod↵top:    def forward(ctx, h):↵top:        return h.softmax(-1)↵top:↵top:    @staticmethod↵top:    def backward(ctx, g):↵top:        return g
h = Rev.apply(h)↵top:class Rev(torch.autograd.Function):↵top:    @staticmethod↵top:    def forward(ctx, h):↵top:        return h * 2↵top:↵top:    @staticmethod↵top:    def backward(ctx, g):↵top:        return -g / g.norm(dim=-1, keepdim=True)
h.register_hook(lambda g: g * 2)
h.register_hook(lambda g: g.softmax(-1)) if h.requires_grad else None
h.register_hook(lambda g: g / g.norm()) if h.requires_grad else None
h.retain_grad() if h.requires_grad else None
init:self.up.register_forward_hook(lambda mod, args, out: out.softmax(-1))
init:self.up.register_forward_hook(lambda mod, args, out: out * 2)
init:self.up.register_forward_pre_hook(lambda mod, args: (args[0] * 2,))
init:self.down.register_forward_pre_hook(lambda mod, args: (args[0].softmax(-1),))
init:self.down.register_forward_pre_hook(lambda mod, args: (args[0] * 2,))
init:self.down.register_forward_hook(lambda mod, args, out: out + 1)
init:self.up.weight.register_hook(lambda g: g * 2)
init:self.up.weight.register_hook(lambda g: g / g.norm())
init:self.up.bias.register_hook(lambda g: g.flip(0))
init:self.up.register_full_backward_hook(lambda mod, a, b: (a[0] * 2,))
init:self.register_forward_hook(lambda mod, args, out: out * 2)
init:self.up.forward = lambda z: F.linear(z, self.up.weight, self.up.bias).tanh()
init:self.up.weight.data.mul_(2.0)
init:nn.init.eye_(self.up.weight)
init:self.up.weight = nn.Parameter(torch.ones({w}, 8))
init:self.up = nn.utils.parametrizations.weight_norm(self.up)
init:self.up = nn.utils.parametrizations.spectral_norm(self.up)
init:self.up = nn.utils.weight_norm(self.up)
init:self.up.bias.requires_grad_(False)
init:self.down.weight.requires_grad = False
init:self.down.weight = nn.Parameter(self.up.weight.T.clone())
h = h + self.up.weight.mean()
h = h * self.up.weight.norm()
h = h + self.up.weight.square().sum()
h = h + self.up.bias
h = h * self.up.bias.sigmoid()
h = h + self.up.bias.mean()
h = h * self.down.weight.norm()
h = h * self.down.weight.square().mean()
h = h + self.down.weight.sum(0)
h = h + self.down.weight[0]
h = h + x @ self.up.weight.T
h = h + F.linear(x, self.up.weight)
h = F.linear(x, self.up.weight, self.up.bias) + h
h = h + F.linear(x, self.up.weight.detach())
h = h / self.up.weight.norm(dim=1)
h = h / self.up.weight.norm(dim=0).sum()
h = h * self.up.weight.shape[0]
h = h * self.up.out_features
h = h / self.up.weight.size(0)
h = h * self.up.weight.numel()
h = h + sum(p.square().sum() for p in self.parameters())
h = h + sum(p.norm() for n, p in self.named_parameters() if "weight" in n)
h = h + sum(p.abs().mean() for p in self.up.parameters())
h = h * sum(p.numel() for p in self.parameters())
h = h + torch.stack([p.sum() for p in self.parameters()]).sum()
h = h + torch.cat([p.flatten() for p in self.parameters()]).norm()
h = h + nn.utils.parameters_to_vector(self.parameters()).norm()
h = h + self.state_dict()["up.weight"].sum()
h = h + self.get_parameter("up.weight").sum()
h = h + getattr(self.up, "weight").sum()
h = h + self._modules["up"].weight.sum()
h = h + self.up._parameters["weight"].sum()
h = h + torch.func.functional_call(self.up, {"weight": self.up.weight * 2, "bias": self.up.bias}, (x,))
h = h + torch.func.functional_call(self.up, dict(self.up.named_parameters()), (x,))
h = h + self.up(x + c)
h = h + self.up(h[..., :8])
h = self.up(x).tanh() * h
h = h * 2 if self.training else h
h = h if self.training else h.flip(-1)
h = h.softmax(-1) if not self.training else h
h = h.relu() if h.size(-1) >= 8 else h.tanh()
h = h.relu() if h.size(-1) >= {w} else h.tanh()
h = h.relu() if h.size(-1) % 8 == 0 else h.tanh()
h = h.relu() if h.shape[-1] > h.shape[1] else h.tanh()
h = h.relu() if h.numel() > 500 else h.tanh()
h = h.softmax(-1) if x.abs().max() > 0 else h
h = h.softmax(-1) if x.sum() > 0 else h
h = h.relu() if h.sum() > 0 else h.tanh()
h = h.relu() if h[0, 0, 0] > 0 else h.tanh()
h = h.relu() if h.abs().max().item() > 1 else h.tanh()
h = h.relu() if torch.any(h > 1) else h.tanh()
h = h.relu() if (h > 0).all() else h.tanh()
h = h.relu() if torch.allclose(h, y) else h.tanh()
h = h.relu() if torch.is_grad_enabled() else h.softmax(-1)
h = h.softmax(-1) if x.dtype == torch.float32 else h
h = h.softmax(-1) if x.size(0) > 3 else h
h = h.softmax(-1) if x.requires_grad else h
h = h.softmax(-1) if h.requires_grad else h
h = h.softmax(-1) if isinstance(x, nn.Parameter) else h
h = h.softmax(-1) if torch.jit.is_scripting() else h
h = h.softmax(-1) if soft else h↵arg:soft=False
h = h + h.flip(-1) * scale↵arg:scale=0.0
h = h if bias is None else h + bias.sum(-1, keepdim=True)↵arg:bias=None
h = h if extra is None else h * extra.softmax(-1)↵arg:extra=None
h = h.softmax(-1) if mode == "soft" else h↵arg:mode="plain"
for _ in range(2):↵    h = h.tanh() + y
for _ in range(h.size(-1) // 6):↵    h = h * 1.1
for j in range(h.size(-1)):↵    h = h + h[..., j : j + 1] * 0.1
for j in range(h.size(1)):↵    h = h + h[:, j : j + 1] * 0.1
for row in h:↵    h = h + row
for part in h.chunk(4, -1):↵    h = h + part.sum(-1, keepdim=True)
for part in h.split(2, -1):↵    h = h + part.mean()
while h.abs().max() > 2:↵    h = h / 2
while h.abs().sum() > 50:↵    h = h / 2
n = 0↵while h.norm() > 3 and n < 5:↵    h, n = h / 2, n + 1
with torch.no_grad():↵    scale = h.abs().amax({d}, keepdim=True)↵h = h / scale
with torch.no_grad():↵    h = h * 2
h = h / h.detach().abs().amax(-1, keepdim=True)
h = h.detach() + h - h.tanh().detach()
h = h + (h.round() - h).detach()
h = h + (h.softmax(-1) - h).detach()
h = h.data * 2 + h
z = h.clone(); z[..., 0] = 0; h = z
z = h.clone(); z.mul_(2); h = z + h
z = h.view(-1, h.size(-1)); z = z * 2; h = z.view(h.shape)
z = h.clone().view(h.size(0), -1); z[:, 0] = 1.0; h = z.view(h.shape)
z = h.clone(); u = z[..., :2]; u.zero_(); h = z
z = h.clone(); u = z.mT; u[:, 0] = 3.0; h = z
z = h.clone(); u = z.unflatten(-1, (12, -1)); u[..., 0].zero_(); h = z
z = h.clone(); u = z.unflatten(-1, (12, -1)); u[..., 0, :].zero_(); h = z
z = x.clone(); z[:, 0] = h[:, 0, :8]; h = h + z.sum(-1, keepdim=True)
z = torch.zeros_like(h); z[:, 1:] = h[:, :-1]; h = z
z = torch.zeros(h.shape); z[..., 1:] = h[..., :-1]; h = z
z = torch.empty_like(h); z.copy_(h); h = z * 2
z = h.new_zeros(h.size(0), h.size(1), h.size(2)); z.add_(h); h = z
z = torch.zeros(*h.shape[:2], {w}); z[..., : h.size(-1)] = h; h = z
z = [h, y]; z[0] = z[0] * 2; h = z[0] + z[1]
z = dict(a=h, b=y); z["a"] = z["a"].tanh(); h = sum(z.values())
z = (h, y, c); h = z[0] * z[2] + z[1]
h, z = y, h; h = h * z
h.add_(1)
h.mul_(2)
h.mul_(y)
h.add_(c)
h.sub_(h.mean({d}, keepdim=True))
h.div_(h.size(-1))
h += c
h *= v
h -= h.mean()
h /= h.norm(dim=-1, keepdim=True)
h.relu_()
h.zero_()
h.fill_(1.0)
h.clamp_(-1, 1)
h.masked_fill_(m, 0.0)
h.masked_fill_(h < 0, 1.0)
h.copy_(y)
h.index_fill_({d}, i % 3, 0.5)
h.transpose_(1, 2).transpose_(1, 2)
h.squeeze_().unsqueeze_(0).squeeze_(0)
h[..., 0].zero_()
h[:, 0].zero_()
h[..., :2].mul_(3)
h.data.mul_(2)
h.data[..., 0] = 0
h.T[0] = 0
h.unbind(-1)[0].zero_()
h.chunk(2, -1)[0].mul_(2)
torch.add(h, 1, out=h.data)
torch.relu_(h)
F.relu(h, inplace=True)
F.dropout(h, 0.0, True, True)
self.buffer.mul_(0.9)
self.buffer.add_(h.detach().mean((0, 1)))
self.buffer.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
self.buffer.copy_(h.detach()[0, 0])
self.buffer = self.buffer * 0.9 + h.detach().mean((0, 1)) * 0.1
self.buffer += h.detach().sum()
self.count += 1; h = h * self.count
self.count += h.size(-1)
self.count.add_((h > 0).sum())
self.count += (h.detach().abs() > 1).sum()
self.last = h
self.last = h.detach().norm(); h = h / self.last
self.state = getattr(self, "state", 0) + 1
return self.down(h) if h.size(-1) == self.down.in_features else h
return {"y": self.down(h), "inner": {"h": h}}
return {"y": self.down(h), "a": [h]}
return {"y": self.down(h), "a": (h,)}
return {"y": self.down(h), "b": Box(h)}↵top:class Box:↵top:    def __init__(self, value):↵top:        self.value = value
return self.down(h), {"h": [h.sum(-1)]}
return self.down(h), [h]
return self.down(h), h
return self.down(h), h.detach()
return self.down(h), h.mean()
return self.down(h), h.shape[-1]
return self.down(h), h.shape
return self.down(h), h.size(1)
return self.down(h), h.norm(dim=-1)
return self.down(h), h.square().mean().sqrt()
return self.down(h), (h > 0).sum()
return self.down(h), (h > 0).double().mean()
return self.down(h), h.argmax(-1)
return self.down(h), h.max().item()
return self.down(h), float(h.abs().mean())
return self.down(h), h.tolist()[0][0][0]
return self.down(h), self.up.weight
return self.down(h), self.up.weight.square().sum()
return self.down(h), sum(p.square().sum() for p in self.parameters())
return self.down(h), self.up.weight.norm(dim=0)
return self.down(h), self.up.out_features
return self.down(h) + self.up.bias.sum()
return self.down(h) + self.down.bias
return self.down(h) + x
return self.down(h) * c
return self.down(h).softmax(-1)
return self.down(h) + self.down(y)
return self.down(h) * self.down(y)
return self.down(h + y) * 2 + 1
return self.down(h).relu() + self.down(y)
return torch.cat([self.down(h), x], -1)
return torch.cat([self.down(h), self.down(y)], 1)
return F.linear(h, self.down.weight, self.down.bias)
return F.linear(h, self.down.weight) + self.down.bias
return h @ self.down.weight.T + self.down.bias
return h @ self.down.weight.mT
return self.down.forward(h)
return self.down.__call__(h)
return nn.Linear.forward(self.down, h)
return torch.addmm(self.down.bias, h.flatten(0, 1), self.down.weight.T).view(x.shape)
return torch.einsum("bsd,od->bso", h, self.down.weight)
return sum(self.down(z) for z in (h, y))
return [self.down(z) for z in (h, y)]
return self.down(torch.stack([h, y])).sum(0)
return self.down(torch.cat([h, y], 1))[:, : h.size(1)]
return self.down(h.double())
return self.down(h.to(x))
return self.down(h.type_as(x))
return self.down(input=h)
return nn.Sequential(nn.Tanh(), self.down)(h)
return checkpoint(self.down, h, use_reentrant=False)↵top:from torch.utils.checkpoint import checkpoint
return self.helper(h)↵def:def helper(self, h):↵def:    return self.down(h.softmax(-1))
return self.helper(h)↵def:def helper(self, h):↵def:    return self.down(h.relu() * h.size(-1))
h = self.norm(h)↵init:self.norm = nn.LayerNorm({w})
h = self.norm(h)↵init:self.norm = nn.RMSNorm({w})
h = self.norm(h)↵init:self.norm = nn.LayerNorm({w})↵shard:norm weight,bias 0
h = self.norm(h)↵init:self.norm = nn.RMSNorm({w})↵shard:norm weight 0
h = self.norm(h.mT).mT↵init:self.norm = nn.BatchNorm1d({w})↵shard:norm weight,bias,running_mean,running_var 0
h = self.norm(h.mT).mT↵init:self.norm = nn.BatchNorm1d({w})↵shard:norm weight,bias 0
h = self.norm(h.mT).mT↵init:self.norm = nn.GroupNorm(12, {w})↵shard:norm weight,bias 0
h = self.norm(h.mT).mT↵init:self.norm = nn.GroupNorm(4, {w})↵shard:norm weight,bias 0
h = self.norm(h)↵init:self.norm = nn.BatchNorm1d(12)
h = self.act(h.mT).mT↵init:self.act = nn.PReLU({w})
h = self.act(h.mT).mT↵init:self.act = nn.PReLU({w})↵shard:act weight 0
h = self.act(h)↵init:self.act = nn.PReLU()
h = self.mid(h)↵init:self.mid = nn.Linear({w}, {w})
h = self.mid(h)↵init:self.mid = nn.Linear({w}, {w})↵shard:mid weight 1
h = self.mid(h)↵init:self.mid = nn.Linear({w}, {w})↵shard:mid weight,bias 0
h = self.mid(h.mT).mT↵init:self.mid = nn.Conv1d({w}, {w}, 3, padding=1, groups={w})↵shard:mid weight,bias 0
h = self.mid(h.mT).mT↵init:self.mid = nn.Conv1d({w}, {w}, 3, padding=1, groups=12)↵shard:mid weight,bias 0
h = self.mid(h.mT).mT↵init:self.mid = nn.Conv1d({w}, {w}, 3, padding=1)↵shard:mid weight 1
h = self.mid(h.mT).mT↵init:self.mid = nn.Conv1d({w}, {w}, 3, padding=1, groups=12)
h = self.lora(h) + h↵init:self.lora = nn.Sequential(nn.Linear({w}, 2, bias=False), nn.Linear(2, {w}, bias=False))
h = h + self.lora(x)↵init:self.lora = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, {w}, bias=False))
h = h + self.lora(x)↵init:self.lora = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, {w}))↵shard:lora.1 weight,bias 0
h = h * self.gate(x).sigmoid()↵init:self.gate = nn.Linear(8, 1)
h = h * self.gate(x).sigmoid()↵init:self.gate = nn.Linear(8, {w})
h = h * self.gate(h).sigmoid()↵init:self.gate = nn.Linear({w}, 1)
h = h * self.gate(h).sigmoid()↵init:self.gate = nn.Linear({w}, 1)↵shard:gate weight 1
h = self.mha(h, h, h)[0]↵init:self.mha = nn.MultiheadAttention({w}, 2, batch_first=True)
h = self.rnn(h)[0]↵init:self.rnn = nn.GRU({w}, {w}, batch_first=True)
h = self.bil(h, y)↵init:self.bil = nn.Bilinear({w}, {w}, 5)
h = self.emb(k) + h↵init:self.emb = nn.Embedding(5, {w})
h = self.emb(k) + h↵init:self.emb = nn.Embedding(5, {w})↵shard:emb weight 1
h = self.emb(k).softmax(-1) + h↵init:self.emb = nn.Embedding(5, {w})↵shard:emb weight 1
h = self.emb(k).sum(-1, keepdim=True) * h↵init:self.emb = nn.Embedding(5, {w})↵shard:emb weight 1
h = h + self.own↵init:self.own = nn.Parameter(torch.randn(12, {w}))
h = h + self.own↵init:self.own = nn.Parameter(torch.randn(12, {w}))↵own:own 1
h = h * self.own.softmax(-1)↵init:self.own = nn.Parameter(torch.randn(12, {w}))↵own:own 1
h = h * self.own.norm()↵init:self.own = nn.Parameter(torch.randn({w}))↵own:own 0
h = h * self.own + self.own.mean()↵init:self.own = nn.Parameter(torch.randn({w}))↵own:own 0
h = h @ self.own↵init:self.own = nn.Parameter(torch.randn({w}, {w}))↵own:own 0
h = h @ self.own↵init:self.own = nn.Parameter(torch.randn({w}, {w}))↵own:own 1
h = (h @ self.own) @ self.own.T↵init:self.own = nn.Parameter(torch.randn({w}, 5))↵own:own 0
h = h + (x @ self.a) @ self.b↵init:self.a, self.b = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12, {w}))↵own:a 1↵own:b 0
h = h * self.own.view(2, -1).flatten()↵init:self.own = nn.Parameter(torch.randn({w}))↵own:own 0
h = h * self.mask↵init:self.register_buffer("mask", torch.arange({w}) % 2)↵own:mask 0
h = h * self.mask.sum()↵init:self.register_buffer("mask", torch.arange({w}) % 2)↵own:mask 0
h = h * self.mask.cumsum(0)↵init:self.register_buffer("mask", torch.arange(24.0))↵own:mask 0
h = h.view(*h.shape[:-1], self.heads, -1).softmax(-1).flatten(-2)↵init:self.heads = 12
h = (h.view(*h.shape[:-1], self.heads, -1) * self.heads).flatten(-2)↵init:self.heads = 12
h = h.view(*h.shape[:-1], self.heads, self.size).mean(-2).repeat(1, 1, self.heads)↵init:self.heads, self.size = 12, 2
h = h.view(-1, self.heads, self.size).sum(-1).repeat_interleave(self.size, -1).view(h.shape)↵init:self.heads, self.size = 12, {w} // 12
h = h.unflatten(-1, (self.heads, -1)).cumsum(-2).flatten(-2)↵init:self.heads = 12
h = h.unflatten(-1, (self.heads, -1)) * self.slopes[:, None]; h = h.flatten(-2)↵init:self.heads = 12↵init:self.register_buffer("slopes", torch.arange(12.0))
h = h.unflatten(-1, (self.heads, -1)) * self.slopes[:, None]; h = h.flatten(-2)↵init:self.heads = 12↵init:self.register_buffer("slopes", torch.arange(12.0))↵own:slopes 0
h = h.unflatten(-1, (self.heads, -1)) * torch.arange(self.heads)[:, None]; h = h.flatten(-2)↵init:self.heads = 12
h = h.unflatten(-1, (self.heads, -1)) / self.size; h = h.flatten(-2)↵init:self.heads, self.size = 12, 2
h = h.split(self.size, -1)[0].repeat(1, 1, 24 // self.size)↵init:self.size = 12
h = h * self.width↵init:self.width = {w}
h = h.view(h.size(0), h.size(1), self.width) / self.width↵init:self.width = {w}
h = F.layer_norm(h, (self.width,))↵init:self.width = {w}
h = F.layer_norm(h, self.norm.normalized_shape, self.norm.weight, self.norm.bias)↵init:self.norm = nn.LayerNorm({w})
h = h * F.softmax(self.norm.weight, 0)↵init:self.norm = nn.LayerNorm({w})
h = functools.reduce(torch.add, [h, y, c])
h = functools.partial(torch.softmax, dim=-1)(h)
h = operator.mul(h, v)
h = operator.itemgetter((slice(None), 0))(h).unsqueeze(1) + h
h = (lambda z: z.softmax(-1))(h)
h = getattr(h, "softmax")(-1)
h = torch.ops.aten.softmax.int(h, -1)
h = torch.ops.aten.mul.Tensor(h, y)
h = torch.Tensor.softmax(h, -1)
h = torch.Tensor.add(h, c)
h = h.apply_(lambda z: z) if False else h
h = torch.from_numpy(h.detach().numpy() * 2) + h
h = torch.tensor(h.detach().tolist()) + h
h = h + torch.tensor(h.detach().norm().item())
h = h.float().double()
h = h.to(torch.float64)
h = h.to(torch.long).to(x.dtype) + h
h = h.type(torch.int32) * h
h = h.bool() * h
h = (h > 0) * h
h = h.int() + h
h = h.round() + h
h = h.sign() * y
h = torch.div(h, 3.0, rounding_mode="floor")
h = h.contiguous().clone().cpu()
h = h.to(x.device, x.dtype, non_blocking=True)
h = torch.complex(h, y).abs()
h = torch.view_as_complex(h.unflatten(-1, (-1, 2))).abs().repeat_interleave(2, -1)
h = torch.view_as_real(torch.polar(h, y)).flatten(-2)
h = torch.sparse.mm(t.to_sparse(), h[0].T).sum() + h
h = h.to_sparse().to_dense()
h = torch.autograd.functional.jacobian(torch.sum, h) + h
h = torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))
h = torch.compile(lambda z: z * 2, backend="eager")(h)
h = Tagged(h).double_it()↵top:class Tagged:↵top:    def __init__(self, value):↵top:        self.value = value↵top:↵top:    def double_it(self):↵top:        return self.value * 2
h = Sub.apply_it(h)↵top:class Sub:↵top:    @staticmethod↵top:    def apply_it(z):↵top:        return z - z.mean(-1, keepdim=True)
h = h.as_subclass(Marked).softmax(-1).as_subclass(torch.Tensor)↵top:class Marked(torch.Tensor):↵top:    pass
h = shared(h, y)↵top:def shared(a, b):↵top:    a = a + b↵top:    return a / a.norm(dim=-1, keepdim=True)
h = shared(h)↵top:def shared(a, scale=None):↵top:    return a * (a.size(-1) if scale is None else scale)
h = cached(h.size(-1)) * h↵top:@functools.lru_cache↵top:def cached(n):↵top:    return n * 0.5
h = h * TABLE↵top:TABLE = torch.arange({w}) * 0.1
h = h * TABLE[: h.size(-1)]↵top:TABLE = torch.arange({w}) * 0.1
h = h + TABLE[h.size(-1) - 1]↵top:TABLE = torch.arange({w}) * 0.1
self.aux = h.square().mean()↵net:x = x + self.inner.aux
self.aux = h.square().mean(-1, keepdim=True).sum()↵net:return x, self.inner.aux
self.aux = h↵net:x = x * self.inner.aux.sum()
self.aux = h.detach()↵net:x = x * self.inner.aux.abs().mean()
self.aux = h.softmax({d})↵net:x = x + self.inner.aux.mean()
self.aux = [h, y]↵net:x = x + sum(a.mean() for a in self.inner.aux)
self.aux = self.up.weight.square().sum()↵net:x = x + self.inner.aux
self.aux = h.size(-1)↵net:x = x * self.inner.aux
net:x = x + self.inner.up.weight.mean()
net:x = x * self.inner.up.out_features
net:x = x + sum(p.square().sum() for p in self.parameters())
net:x = x + sum(p.norm() for p in self.inner.up.parameters())
net:x = x + F.linear(x, self.inner.up.weight, self.inner.up.bias).mean()
net:x = x + self.inner.up(x).mean()
net:x = x + self.inner.up(x).sum(-1, keepdim=True)
net:x = x + self.inner(x)
net:x = self.inner(x.tanh()) * x
net:x = x + self.inner.down(self.inner.up(x))
net:x = x + self.inner.forward(x)
net:x = x + self.inner.up.bias.sum()
STORE.append(h)↵top:STORE = []↵net:x = x + STORE.pop().mean()
STORE.append(h.mean(-1))↵top:STORE = []↵net:x = x + STORE.pop().sum()
STORE["h"] = h.square().sum()↵top:STORE = {}↵net:x = x + STORE.pop("h")
Inner.last = h.abs().max()↵net:x = x / (1 + Inner.last)
with torch.no_grad():↵    z = self.up(x)↵h = h + z
with torch.no_grad():↵    z = self.up(x).softmax(-1)↵h = h + z
with torch.enable_grad():↵    z = self.up(x)↵h = h * z
h = self.up(x.detach()) + h
h = self.up(x) + self.up(x).detach()
h = self.up(x.flip(1)).flip(1) + h
h = self.up(x * self.scalar) + h
h = h + self.up(c.expand(-1, -1, 8))
h = self.up(self.down(h))
h = self.up(self.down(h)) + h
h = h * self.down(h).mean()
h = h * self.down(h).mean(-1, keepdim=True)
h = h + self.down(h).sum(-1, keepdim=True)
h = self.both(x) + h↵init:self.both = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, {w}))
h = self.both(x) + h↵init:self.both = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, {w}))↵shard:both.2 weight,bias 0
h = self.both(x) + h↵init:self.both = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, {w}))↵shard:both.0 weight,bias 0↵shard:both.2 weight 1
h = self.own(h)↵init:self.own = Own({w})↵top:class Own(nn.Linear):↵top:    def __init__(self, n):↵top:        super().__init__(n, n)↵top:↵top:    def forward(self, z):↵top:        return z + super().forward(z)
h = self.own(x) + h↵init:self.own = Own(8, {w})↵top:class Own(nn.Linear):↵top:    def forward(self, z):↵top:        return super().forward(z) * 2↵shard:own weight,bias 0
h = self.own(x) + h↵init:self.own = Own(8, {w})↵top:class Own(nn.Linear):↵top:    def forward(self, z):↵top:        return F.linear(z, self.weight, self.bias).softmax(-1)↵shard:own weight,bias 0
h = self.own(h)↵init:self.own = Own({w})↵top:class Own(nn.Module):↵top:    def __init__(self, n):↵top:        super().__init__()↵top:        self.weight = nn.Parameter(torch.ones(n))↵top:↵top:    def forward(self, z):↵top:        return z / (z.norm(dim=-1, keepdim=True) + 1) * self.weight↵shard:own weight 0
h = self.own(h)↵init:self.own = Own({w})↵top:class Own(nn.Module):↵top:    def __init__(self, n):↵top:        super().__init__()↵top:        self.weight = nn.Parameter(torch.ones(n))↵top:↵top:    def forward(self, z):↵top:        u, v = z.mean(-1, keepdim=True), z.var(-1, keepdim=True, correction=0)↵top:        return (z - u) / (v + 1e-5).sqrt() * self.weight↵shard:own weight 0
h = self.own(h)↵init:self.own = Own({w})↵top:class Own(nn.Module):↵top:    def __init__(self, n):↵top:        super().__init__()↵top:        self.weight = nn.Parameter(torch.ones(n))↵top:↵top:    def forward(self, z):↵top:        u = z.mean(-1, keepdim=True)↵top:        s = z.std(-1, keepdim=True)↵top:        return self.weight * (z - u) / (s + 1e-5)↵shard:own weight 0
h = self.own(h)↵init:self.own = Own({w})↵top:class Own(nn.Module):↵top:    def __init__(self, n):↵top:        super().__init__()↵top:        self.weight = nn.Parameter(torch.ones(n))↵top:↵top:    def forward(self, z):↵top:        s = z.pow(2).sum(-1, keepdim=True) / z.size(-1)↵top:        return self.weight * z * torch.rsqrt(s + 1e-5)↵shard:own weight 0
h = self.own(h)↵init:self.own = Own({w})↵top:class Own(nn.Module):↵top:    def __init__(self, n):↵top:        super().__init__()↵top:        self.weight = nn.Parameter(torch.ones(n))↵top:↵top:    def forward(self, z):↵top:        return self.weight * z * torch.rsqrt(z.pow(2).mean() + 1e-5)↵shard:own weight 0
h = self.own(h)↵init:self.own = Own({w})↵top:class Own(nn.Module):↵top:    def __init__(self, n):↵top:        super().__init__()↵top:        self.weight = nn.Parameter(torch.ones(n))↵top:↵top:    def forward(self, z):↵top:        return self.weight * z * torch.rsqrt(z.pow(2).mean((1, 2), keepdim=True) + 1e-5)↵shard:own weight 0
h = self.own(h)↵init:self.own = Own({w})↵top:class Own(nn.Module):↵top:    def __init__(self, n):↵top:        super().__init__()↵top:        self.weight = nn.Parameter(torch.ones(n))↵top:        self.n = n↵top:↵top:    def forward(self, z):↵top:        return self.weight * z * torch.rsqrt(z.norm(2, dim=-1, keepdim=True) ** 2 / self.n + 1e-5)↵shard:own weight 0
h = h * self.scale.mean()↵init:self.scale = nn.Parameter(torch.rand({w}))↵own:scale 0
h = (h * self.scale).mean(-1, keepdim=True) * h↵init:self.scale = nn.Parameter(torch.rand({w}))↵own:scale 0
h = (h * self.scale).var(-1, keepdim=True) * h↵init:self.scale = nn.Parameter(torch.rand({w}))↵own:scale 0
h = h.std({d}, keepdim=True) * self.scale * h↵init:self.scale = nn.Parameter(torch.rand({w}))↵own:scale 0
assert h.size(-1) == {w}
assert h.shape == (h.size(0), h.size(1), h.size(2))
if h.size(-1) != {w}:↵    raise ValueError("size")
if h.shape[-1] != self.up.out_features:↵    raise ValueError("size")
if h.isnan().any():↵    h = h.nan_to_num()
if not torch.isfinite(h).all():↵    raise ValueError("not finite")
try:↵    h = h.view(-1, 12, {w})↵except RuntimeError:↵    h = h * 2
try:↵    h = h + v↵except RuntimeError:↵    h = h + 1
print(h.shape, end="") if False else None
""".strip().split("\n")
)

GATE = """top:class Gate(torch.autograd.Function):
top:    @staticmethod
top:    def forward(ctx, h, gate):
top:        ctx.save_for_backward(h, gate)
top:        return h * gate
top:
top:    @staticmethod
top:    def backward(ctx, g):
top:        h, gate = ctx.saved_tensors
top:        return (g * gate).sum_to_size(h.shape), (g * h).sum_to_size(gate.shape)"""
