"""Canonical names of operations, with their parameters and all spellings.

`F.gelu(x)`, `torch.nn.functional.gelu(input=x)` and a call of an `nn.GELU()` are one operation,
`gelu`, with parameters `input` and `approximate`. Operations that are not listed only have a name:
`torch.foo(x, 1)` and `x.foo(1)` are the same, but keywords are not matched with positions.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slapo_rewrite.code.arguments import Signature


class Required:
    """Marks a parameter without default."""


@dataclass(frozen=True)
class Operation:
    """One operation."""

    name: str  # its canonical name
    # Its parameters and their defaults; the name of a variadic parameter has a leading star.
    parameters: tuple[tuple[str, object], ...]
    module: str = ""  # the class of `torch.nn` whose call is this operation
    inputs: int = 1  # the number of first parameters that such a call takes
    # Parameters that are sizes and rates: a class as pattern matches any of their values.
    free: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()  # parameters that are tensors of the module
    # Attributes of the module with the values that they must have for this operation.
    only: tuple[tuple[str, object], ...] = ()
    commutes: bool = False  # whether the first two operands commute
    draws: bool = False  # whether it draws random numbers
    view: bool = False  # whether the result may share memory with its first operand
    number: bool = False  # whether the result is a number or shape, never a tensor
    positional: int = field(default=99)

    @property
    def names(self) -> list[str]:
        """The names of its parameters."""
        return [name.lstrip("*") for name, _ in self.parameters]


def parse(signature: str) -> tuple[tuple[tuple[str, object], ...], int]:
    """Parameters with their defaults, and how many of them may be passed by position."""
    function = ast.parse(f"def f({signature}): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    takes = Signature.of(function)
    found: list[tuple[str, object]] = [
        (name, ast.literal_eval(takes.defaults[name]) if name in takes.defaults else Required)
        for name in takes.names
    ]
    positional = len(takes.positional)
    if takes.rest:
        found.insert(positional, (f"*{takes.rest}", Required))
        positional += 1
    return tuple(found), positional


@functools.cache
def operations() -> dict[str, Operation]:
    """All operations by their canonical names."""
    found = (operation for line in _LISTED.split("\n")[1:-1] for operation in _listed(line))
    return {operation.name: operation for operation in found}


def _listed(line: str) -> Iterator[Operation]:
    """The operations of a line of the list."""
    takes, _, said = line.partition("): ")
    names, _, signature = takes.removesuffix(")").partition("(")
    parameters, positional = parse(signature)
    facts: dict[str, Any] = {}
    modules: Sequence[str] = ()
    for fact in filter(None, said.split(", ")):
        match fact.split():
            case ["as", *modules]:
                pass
            case ["inputs", number]:
                facts["inputs"] = int(number)
            case ["free" | "tensors" as key, *of]:
                facts[key] = frozenset(of)
            case [key]:
                facts[key] = True
    for name, module in itertools.zip_longest(names.split(), modules, fillvalue=""):
        only = _ONLY.get(module, ())
        yield Operation(name, parameters, module, only=only, positional=positional, **facts)


@functools.cache
def by_module() -> dict[str, Operation]:
    """The operations of `torch.nn` modules, by class."""
    return {f"torch.nn.{o.module}": o for o in operations().values() if o.module}


# Names with their parameters, the modules of `torch.nn` that compute them, and further properties.
_LISTED = """
relu relu6 silu mish selu hardswish hardsigmoid(input, inplace=False): \
as ReLU ReLU6 SiLU Mish SELU Hardswish Hardsigmoid
exp log sqrt rsqrt erf abs sin cos neg reciprocal log1p clone bitwise_not logical_not isnan isinf \
floor ceil round(input)
mul eq ne maximum minimum logical_and logical_or bitwise_and bitwise_or bitwise_xor(input, other): \
commutes
floor_divide remainder lt le bmm mv dot pow atan2 lshift rshift matmul(input, other)
add(input, other, *, alpha=1): commutes
sub(input, other, *, alpha=1)
div(input, other, *, rounding_mode=None)
sigmoid tanh logsigmoid softsign(input): as Sigmoid Tanh LogSigmoid Softsign
gelu(input, approximate='none'): as GELU
elu(input, alpha=1.0, inplace=False): as ELU
leaky_relu(input, negative_slope=0.01, inplace=False): as LeakyReLU
softplus(input, beta=1.0, threshold=20.0): as Softplus
hardtanh(input, min_val=-1.0, max_val=1.0, inplace=False): as Hardtanh
glu(input, dim=-1): as GLU
softmax log_softmax(input, dim=None, *, dtype=None): as Softmax LogSoftmax
dropout dropout1d dropout2d dropout3d alpha_dropout(input, p=0.5, training=True, inplace=False): \
as Dropout Dropout1d Dropout2d Dropout3d AlphaDropout, free p, draws
linear(input, weight, bias=None): as Linear, tensors weight bias
layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05): \
as LayerNorm, tensors weight bias, free normalized_shape eps
rms_norm(input, normalized_shape, weight=None, eps=None): \
as RMSNorm, tensors weight, free normalized_shape eps
group_norm(input, num_groups, weight=None, bias=None, eps=1e-05): \
as GroupNorm, tensors weight bias, free num_groups eps
conv1d conv2d conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1): \
as Conv1d Conv2d Conv3d, tensors weight bias, free stride padding dilation groups
max_pool1d max_pool2d max_pool3d(input, kernel_size, stride=None, padding=0, dilation=1, \
ceil_mode=False, return_indices=False): \
as MaxPool1d MaxPool2d MaxPool3d, free kernel_size stride padding
embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0): \
as Embedding, tensors weight, free padding_idx
scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, \
scale=None, enable_gqa=False): draws
cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, \
reduction='mean', label_smoothing=0.0): as CrossEntropyLoss, inputs 2, free ignore_index
where(condition, input, other)
masked_fill(input, mask, value)
clamp(input, min=None, max=None)
cat stack(tensors, dim=0)
einsum(equation, *operands)
repeat_interleave(input, repeats, dim=None)
repeat(input, *repeats)
tril triu(input, diagonal=0)
addmm(input, mat1, mat2, *, beta=1, alpha=1)
baddbmm(input, batch1, batch2, *, beta=1, alpha=1)
norm(input, p='fro', dim=None, keepdim=False, dtype=None)
bernoulli(input): draws
to(input, dtype)
transpose(input, dim0, dim1): view
permute(input, *dims): view
view reshape(input, *shape): view
expand(input, *sizes): view
flatten(input, start_dim=0, end_dim=-1): view
unflatten(input, dim, sizes): view
unsqueeze(input, dim): view
squeeze(input, dim=None): view
contiguous detach t(input): view
chunk(input, chunks, dim=0): view
split(input, split_size, dim=0): view
narrow(input, dim, start, length): view
select(input, dim, index): view
expand_as view_as reshape_as type_as(input, other): view
mean sum(input, dim=None, keepdim=False, *, dtype=None)
amax amin any all argmax argmin(input, dim=None, keepdim=False)
cumsum cumprod(input, dim, *, dtype=None)
size(input, dim=None): number
dim numel(input): number
"""
_ONLY = {
    "Embedding": (("scale_grad_by_freq", False), ("sparse", False)),
    **{f"Conv{n}d": (("padding_mode", "zeros"),) for n in (1, 2, 3)},
}

# Aliases of listed operations, as torch functions or methods.
SYNONYMS = {
    **{"multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div"},
    **{"negative": "neg", "swapaxes": "transpose", "swapdims": "transpose"},
    **{"concat": "cat", "concatenate": "cat", "absolute": "abs", "clip": "clamp"},
    **{"special_erf": "erf", "special_expit": "sigmoid", "not_equal": "ne", "arccos": "acos"},
    **{"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
}
# Spellings that take their arguments in another order or by other names.
SIGNATURES = {
    "torch.nn.functional.softmax": "input, dim=None, _stacklevel=3, dtype=None",
    "torch.nn.functional.log_softmax": "input, dim=None, _stacklevel=3, dtype=None",
    "torch.dropout": "input, p, training",
    "torch.layer_norm": "input, normalized_shape, weight=None, bias=None, eps=1e-05, "
    "cudnn_enable=True",
}
# Parameter names in torch that differ from the listed ones.
PARAMETERS = {
    ("add", "x"): "input", ("dropout", "train"): "training", ("pow", "exponent"): "other",
    ("reshape", "size"): "shape", ("view", "size"): "shape", ("expand", "size"): "sizes",
    ("split", "split_size_or_sections"): "split_size", ("transpose", "axis0"): "dim0",
    ("transpose", "axis1"): "dim1", ("matmul", "mat2"): "other",
    **{(name, "self"): "input" for name in ("add", "mul", "matmul")},
    **{(name, "axis"): "dim" for name in ("mean", "sum", "softmax", "cat", "unsqueeze")},
}  # fmt: skip
# Methods that cast: `x.float()` is `x.to(torch.float32)`.
CASTS = {
    **{"float": "float32", "half": "float16", "double": "float64", "bfloat16": "bfloat16"},
    **{"long": "int64", "int": "int32", "bool": "bool"},
}
DTYPES = {f"torch.{old}": f"torch.{new}" for old, new in CASTS.items()}

BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder", ast.Pow: "pow", ast.MatMult: "matmul", ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or", ast.BitXor: "bitwise_xor", ast.LShift: "lshift", ast.RShift: "rshift",
}  # fmt: skip
UNARY: dict[type[ast.unaryop], str] = {
    ast.USub: "neg", ast.Not: "not", ast.Invert: "bitwise_not", ast.UAdd: "pos",
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
# Comparisons that are replaced by another one with swapped operands.
MIRRORED = {"gt": "lt", "ge": "le"}

_RANDOM = (
    *("rand", "dropout", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_"),
    *("manual_seed", "rng_state", "fork_rng"),
)


def draws_by_name(name: str) -> bool:
    """Whether a function or method draws random numbers, judging by its name."""
    last = name.rpartition(".")[2]
    return any(part in last for part in _RANDOM) or last == "normal"


def draws(function: ast.AST, others: Mapping[str, ast.FunctionDef], depth: int = 3) -> bool:
    """Whether a function calls something that draws random numbers, judging by names."""
    names = _called(function)
    return any(map(draws_by_name, names)) or (
        depth > 0 and any(draws(others[n], others, depth - 1) for n in names if n in others)
    )


@functools.lru_cache(maxsize=4096)
def _called(function: ast.AST) -> frozenset[str]:
    found = set()
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                found.add(name)
    return frozenset(found)
