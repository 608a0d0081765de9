"""Operations by one canonical name: what they take, and every way in which they are spelled.

`F.gelu(x)`, `torch.nn.functional.gelu(input=x)` and a call of an `nn.GELU()` are one operation,
`gelu`, of `input` and `approximate`. An operation that is not listed is known by its name alone:
`torch.foo(x, 1)` and `x.foo(1)` are the same then, but keywords are not matched with positions.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from slapo_rewrite.code.arguments import Signature


class Required:
    """Stands for the default of a parameter that has none."""


@dataclass(frozen=True)
class Operation:
    """One operation."""

    name: str  # its canonical name
    # Its parameters and their defaults; the name of one that takes all further positional arguments
    # begins with a star.
    parameters: tuple[tuple[str, object], ...]
    module: str = ""  # the class of `torch.nn` whose call it is
    inputs: int = 1  # how many of the parameters such a call is given, from the first
    # Parameters that are sizes and rates: a pattern that is a class matches any.
    free: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()  # parameters that the module holds as its own
    # Attributes by which such a module would do something else, and what they have to be.
    only: tuple[tuple[str, object], ...] = ()
    commutes: bool = False  # whether the first two operands may change places
    draws: bool = False  # whether it draws random numbers
    view: bool = False  # whether the result may share memory with its first operand
    number: bool = False  # whether the result is a number or a shape, never a tensor
    positional: int = field(default=99)

    @property
    def names(self) -> list[str]:
        """The names of its parameters."""
        return [name.lstrip("*") for name, _ in self.parameters]


def parse(signature: str) -> tuple[tuple[tuple[str, object], ...], int]:
    """Parameters with their defaults, and how many of them may be given by position."""
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


def _operation(name: str, signature: str, **facts: object) -> Operation:
    parameters, positional = parse(signature)
    for key in ("free", "tensors"):
        facts[key] = frozenset(str(facts.get(key, "")).split())
    return Operation(name, parameters, positional=positional, **facts)  # type: ignore[arg-type]


@functools.cache
def operations() -> dict[str, Operation]:
    """All operations by their canonical names."""
    found = [
        *(_operation(n, "input, inplace=False", module=m) for n, m in _ACTIVATIONS.items()),
        *(_operation(n, "input") for n in _UNARY),
        *(_operation(n, "input, other", commutes=True) for n in _COMMUTATIVE),
        *(_operation(n, "input, other") for n in _BINARY),
        *_OTHERS,
        *(_operation(n, s, view=True) for n, s in _VIEWS.items()),
        *(_operation(n, s) for n, s in _REDUCTIONS.items()),
        *(_operation(n, s, number=True) for n, s in _NUMBERS.items()),
    ]
    return {operation.name: operation for operation in found}


@functools.cache
def by_module() -> dict[str, Operation]:
    """The operations that modules of `torch.nn` carry out, by the module's class."""
    return {f"torch.nn.{o.module}": o for o in operations().values() if o.module}


_ACTIVATIONS = {"relu": "ReLU", "relu6": "ReLU6", "silu": "SiLU", "mish": "Mish", "selu": "SELU"}
_ACTIVATIONS |= {"hardswish": "Hardswish", "hardsigmoid": "Hardsigmoid"}
_UNARY = (
    *("exp", "log", "sqrt", "rsqrt", "erf", "abs", "sin", "cos", "neg", "reciprocal", "log1p"),
    *("clone", "bitwise_not", "logical_not", "isnan", "isinf", "floor", "ceil", "round"),
)
_COMMUTATIVE = (
    *("mul", "eq", "ne", "maximum", "minimum", "logical_and", "logical_or"),
    *("bitwise_and", "bitwise_or", "bitwise_xor"),
)
_BINARY = (
    *("floor_divide", "remainder", "lt", "le", "bmm", "mv", "dot", "pow", "atan2"),
    *("lshift", "rshift"),
)
_REDUCED = "input, dim=None, keepdim=False"
_REDUCTIONS = {
    **dict.fromkeys(("mean", "sum"), f"{_REDUCED}, *, dtype=None"),
    **dict.fromkeys(("amax", "amin", "any", "all", "argmax", "argmin"), _REDUCED),
    **dict.fromkeys(("cumsum", "cumprod"), "input, dim, *, dtype=None"),
}
_NUMBERS = {"size": "input, dim=None", "dim": "input", "numel": "input"}
_VIEWS = {
    "transpose": "input, dim0, dim1",
    "permute": "input, *dims",
    "view": "input, *shape",
    "reshape": "input, *shape",
    "expand": "input, *sizes",
    "flatten": "input, start_dim=0, end_dim=-1",
    "unflatten": "input, dim, sizes",
    "unsqueeze": "input, dim",
    "squeeze": "input, dim=None",
    "contiguous": "input",
    "detach": "input",
    "chunk": "input, chunks, dim=0",
    "split": "input, split_size, dim=0",
    "narrow": "input, dim, start, length",
    "select": "input, dim, index",
    "expand_as": "input, other",
    "view_as": "input, other",
    "reshape_as": "input, other",
    "type_as": "input, other",
    "t": "input",
}
_CONV = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
_NORM = "input, normalized_shape, weight=None, bias=None, eps=1e-05"
_OTHERS = (
    _operation("add", "input, other, *, alpha=1", commutes=True),
    _operation("sub", "input, other, *, alpha=1"),
    _operation("div", "input, other, *, rounding_mode=None"),
    _operation("matmul", "input, other"),
    _operation("sigmoid", "input", module="Sigmoid"),
    _operation("tanh", "input", module="Tanh"),
    _operation("logsigmoid", "input", module="LogSigmoid"),
    _operation("softsign", "input", module="Softsign"),
    _operation("gelu", "input, approximate='none'", module="GELU"),
    _operation("elu", "input, alpha=1.0, inplace=False", module="ELU"),
    _operation("leaky_relu", "input, negative_slope=0.01, inplace=False", module="LeakyReLU"),
    _operation("softplus", "input, beta=1.0, threshold=20.0", module="Softplus"),
    _operation("hardtanh", "input, min_val=-1.0, max_val=1.0, inplace=False", module="Hardtanh"),
    _operation("glu", "input, dim=-1", module="GLU"),
    _operation("softmax", "input, dim=None, *, dtype=None", module="Softmax"),
    _operation("log_softmax", "input, dim=None, *, dtype=None", module="LogSoftmax"),
    *(
        _operation(
            name, "input, p=0.5, training=True, inplace=False", module=module, free="p", draws=True
        )
        for name, module in (
            ("dropout", "Dropout"),
            ("dropout1d", "Dropout1d"),
            ("dropout2d", "Dropout2d"),
            ("dropout3d", "Dropout3d"),
            ("alpha_dropout", "AlphaDropout"),
        )
    ),
    _operation("linear", "input, weight, bias=None", module="Linear", tensors="weight bias"),
    _operation(
        *("layer_norm", _NORM),
        module="LayerNorm",
        tensors="weight bias",
        free="normalized_shape eps",
    ),
    _operation(
        *("rms_norm", "input, normalized_shape, weight=None, eps=None"),
        module="RMSNorm",
        tensors="weight",
        free="normalized_shape eps",
    ),
    _operation(
        *("group_norm", "input, num_groups, weight=None, bias=None, eps=1e-05"),
        module="GroupNorm",
        tensors="weight bias",
        free="num_groups eps",
    ),
    *(
        _operation(
            f"conv{n}d",
            _CONV,
            module=f"Conv{n}d",
            tensors="weight bias",
            free="stride padding dilation groups",
            only=(("padding_mode", "zeros"),),
        )
        for n in (1, 2, 3)
    ),
    *(
        _operation(
            *(f"{kind}_pool{n}d", f"input, kernel_size, stride=None, padding=0{more}"),
            module=f"{kind.capitalize()}Pool{n}d",
            free="kernel_size stride padding",
        )
        for n in (1, 2, 3)
        for kind, more in (("max", ", dilation=1, ceil_mode=False, return_indices=False"),)
    ),
    _operation(
        *("embedding", "input, weight, padding_idx=None, max_norm=None, norm_type=2.0"),
        module="Embedding",
        tensors="weight",
        free="padding_idx",
        only=(("scale_grad_by_freq", False), ("sparse", False)),
    ),
    _operation(
        "scaled_dot_product_attention",
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, "
        "enable_gqa=False",
        draws=True,
    ),
    _operation(
        "cross_entropy",
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, "
        "reduction='mean', label_smoothing=0.0",
        module="CrossEntropyLoss",
        inputs=2,
        free="ignore_index",
    ),
    _operation("where", "condition, input, other"),
    _operation("masked_fill", "input, mask, value"),
    _operation("clamp", "input, min=None, max=None"),
    _operation("cat", "tensors, dim=0"),
    _operation("stack", "tensors, dim=0"),
    _operation("einsum", "equation, *operands"),
    _operation("repeat_interleave", "input, repeats, dim=None"),
    _operation("repeat", "input, *repeats"),
    _operation("tril", "input, diagonal=0"),
    _operation("triu", "input, diagonal=0"),
    _operation("addmm", "input, mat1, mat2, *, beta=1, alpha=1"),
    _operation("baddbmm", "input, batch1, batch2, *, beta=1, alpha=1"),
    _operation("norm", "input, p='fro', dim=None, keepdim=False, dtype=None"),
    _operation("bernoulli", "input", draws=True),
    _operation("to", "input, dtype"),
)

# Other names of listed operations, as functions of torch or methods.
SYNONYMS = {
    **{"multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div"},
    **{"negative": "neg", "swapaxes": "transpose", "swapdims": "transpose"},
    **{"concat": "cat", "concatenate": "cat", "absolute": "abs", "clip": "clamp"},
    **{"special_erf": "erf", "special_expit": "sigmoid", "not_equal": "ne", "arccos": "acos"},
    **{"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
}
# Where a spelling takes its arguments in another order or by other names.
SIGNATURES = {
    "torch.nn.functional.softmax": "input, dim=None, _stacklevel=3, dtype=None",
    "torch.nn.functional.log_softmax": "input, dim=None, _stacklevel=3, dtype=None",
    "torch.dropout": "input, p, training",
    "torch.layer_norm": _NORM + ", cudnn_enable=True",
}
# Parameters of torch under a name that is not the listed one.
PARAMETERS = {
    ("add", "x"): "input",
    ("dropout", "train"): "training",
    ("pow", "exponent"): "other",
    ("reshape", "size"): "shape",
    ("view", "size"): "shape",
    ("expand", "size"): "sizes",
    ("split", "split_size_or_sections"): "split_size",
    ("transpose", "axis0"): "dim0",
    ("transpose", "axis1"): "dim1",
    ("matmul", "mat2"): "other",
    **{(name, "self"): "input" for name in ("add", "mul", "matmul")},
    **{(name, "axis"): "dim" for name in ("mean", "sum", "softmax", "cat", "unsqueeze")},
}
# Methods that only choose a type: `x.float()` is `x.to(torch.float32)`.
CASTS = {
    **{"float": "float32", "half": "float16", "double": "float64", "bfloat16": "bfloat16"},
    **{"long": "int64", "int": "int32", "bool": "bool"},
}
DTYPES = {f"torch.{old}": f"torch.{new}" for old, new in CASTS.items()}

BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
}
UNARY: dict[type[ast.unaryop], str] = {
    ast.USub: "neg",
    ast.Not: "not",
    ast.Invert: "bitwise_not",
    ast.UAdd: "pos",
}
COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
# A comparison with its operands exchanged.
MIRRORED = {"gt": "lt", "ge": "le"}

_RANDOM = (
    *("rand", "dropout", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_"),
    *("manual_seed", "rng_state", "fork_rng"),
)


def draws_by_name(name: str) -> bool:
    """Whether a function or method of this name draws random numbers, as far as names tell."""
    last = name.rpartition(".")[2]
    return any(part in last for part in _RANDOM) or last == "normal"


def draws(function: ast.AST, others: Mapping[str, ast.FunctionDef], depth: int = 3) -> bool:
    """Whether a function calls something that draws random numbers, as far as names tell."""
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
