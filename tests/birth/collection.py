"""Small faulty models and losses: the line where the first bad value is made ends in `# born`, or `# graph` where the
operation stands whose gradient it is. Each takes nothing and runs a forward, and a backward where it says so."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

INF = float("inf")


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[nn.Module], object]  # with the model
    make: Callable[[], nn.Module]
    operation: str
    why: str
    about: str


CASES: list[Case] = []
CLEAN: list[Case] = []


def case(operation: str, why: str, make: Callable[[], nn.Module] | None = None):
    def keep(run):
        CASES.append(Case(run.__name__, run, make or head, operation, why, run.__doc__))
        return run

    return keep


def clean(make: Callable[[], nn.Module] | None = None):
    def keep(run):
        CLEAN.append(Case(run.__name__, run, make or head, "", "", run.__doc__))
        return run

    return keep


def head() -> nn.Module:
    return nn.Linear(4, 4)


def x(rows: int = 3) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 4).view(rows, 4)


def spoilt(model):
    nn.init.constant_(model.weight, torch.nan)
    return model


def never_trained():
    norm = nn.BatchNorm1d(4).eval()
    nn.init.constant_(norm.running_var, -1.0)
    return nn.Sequential(nn.Linear(4, 4), norm)


WITH_NAN, WITH_INF = x(), x()
WITH_NAN[1, 2], WITH_INF[1, 2] = torch.nan, INF


class Inside(nn.Module):
    """A model whose `layer` has the fault in its own forward."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), Layer(forward), nn.Linear(4, 2)

    def forward(self, value):
        return self.last(self.layer(self.first(value)))


class Layer(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, value):
        return self.function(value)


def inside(function):
    return lambda: Inside(function)


# In the forward.


@case("log", "log of 0")
def log_of_zero(model):
    """the log of a probability that softmax rounds to 0"""
    p = (model(x()) * 1e4).softmax(-1)
    torch.log(p).mean().backward()  # born


@case("log", "log of a negative number")
def log_of_negative(model):
    """the log of a value that may be negative"""
    torch.log(model(x())).mean().backward()  # born


@case("log1p", "log1p of -1")
def log1p_of_minus_one(model):
    """log1p at -1"""
    value = model(x()).clamp(max=0).mul(1e9).clamp(min=-1)
    torch.log1p(value).mean().backward()  # born


@case("div", "division by zero")
def division_by_zero(model):
    """a mean over the places of a mask that has none"""
    total, many = model(x()).abs().sum() + 1, torch.zeros(())
    (total / many).backward()  # born


@case("div", "0 / 0")
def zero_by_zero(model):
    """a masked mean: nothing by nothing"""
    keep = torch.zeros(3, 1)
    loss = (model(x()) * keep).sum() / keep.sum()  # born
    loss.backward()


@case("div", "0 / 0", inside(lambda value: (value * 0) / (value * 0).norm(dim=-1, keepdim=True)))  # born
def normalised_zero_vector(model):
    """a vector of zeros divided by its norm, inside a layer"""
    model(x()).sum().backward()


@case("sqrt", "sqrt of a negative number")
def sqrt_of_negative(model):
    """the square root of a variance that rounds below zero"""
    value = model(x())
    deviation = torch.sqrt(value.pow(2).mean() - value.pow(2).mean() - 1e-6)  # born
    deviation.backward()


@case("rsqrt", "rsqrt of 0")
def rsqrt_of_zero(model):
    """an own RMS norm without an epsilon, for a row of zeros"""
    value = model(x()) * 0
    (value * value.pow(2).mean(-1, keepdim=True).rsqrt()).sum().backward()  # born


@case("pow", "a negative number to a power that is no integer")
def power_of_negative(model):
    """a negative number to the power 1.5"""
    (model(x()) ** 1.5).mean().backward()  # born


@case("pow", "0 to a negative power")
def zero_to_minus_one(model):
    """zero to the power -1"""
    (torch.relu(model(x()) - 9) ** -1).mean().backward()  # born


@case("reciprocal", "division by zero")
def reciprocal_of_zero(model):
    """1 / x at 0"""
    (1 / torch.relu(model(x()) - 9)).mean().backward()  # born


@case("exp", "exp of 200")
def exp_overflows(model):
    """exp of a log-variance that is too large"""
    spread = torch.exp(model(x()) * 0 + 200)  # born
    spread.mean().backward()


@case("mm", "more than float16 can hold")
def float16_product(model):
    """a matrix product in float16"""
    a = torch.full((4, 4), 300.0, dtype=torch.float16)
    (a @ a).float().mul(model(x()).sum()).sum().backward()  # born


@case("to_copy", "more than float16 can hold")
def float16_cast(model):
    """a value of 100,000 cast to float16"""
    (model(x()) * 0 + 1e5).half().float().mean().backward()  # born


@case("addmm", "more than float16 can hold")
def autocast_overflows(model):
    """a Linear under autocast to float16, with inputs of 60,000"""
    nn.init.ones_(model.weight)
    with torch.autocast("cpu", torch.float16):
        value = model(torch.full((3, 4), 6e4))  # born
    value.float().mean().backward()


@case("sum", "more than float16 can hold")
def float16_sum(model):
    """a sum over 4,096 values of 100 in float16"""
    (model(x()).sum().half() * 0 + torch.full((4096,), 100.0).half().sum()).float().backward()  # born


@case("mul", "more than float32 can hold")
def product_overflows(model):
    """a product beyond float32"""
    large = model(x()).abs() * 0 + 1e30
    (large * large).mean().backward()  # born


@case("sub", "inf - inf")
def infinity_minus_infinity(model):
    """the difference of two masks"""
    mask = torch.zeros(3, 4).masked_fill(x() > 0, -INF)
    (model(x()) + (mask - mask)).mean().backward()  # born


@case("mul", "0 × inf")
def zero_times_infinity(model):
    """a mask of -inf that is multiplied instead of added"""
    mask = torch.zeros(3, 4).masked_fill(x() > 0, -INF)
    (model(x()) * 0 * mask).mean().backward()  # born


@case("softmax", "softmax over a row that is -inf throughout")
def fully_masked_row(model):
    """attention scores with a row that a mask hides entirely"""
    scores = model(x()).masked_fill(torch.tensor([[True], [False], [False]]), -INF)
    scores.softmax(-1).square().sum().backward()  # born


@case("log_softmax", "softmax over a row that is -inf throughout")
def fully_masked_logits(model):
    """no class is allowed for one sample"""
    scores = model(x()).masked_fill(torch.tensor([[True], [False], [False]]), -INF)
    F.cross_entropy(scores, torch.tensor([0, 1, 2])).backward()  # born


@case("layer_norm", "with an eps of 0")
def layer_norm_without_eps(model):
    """a LayerNorm with eps=0, for a row of equal values"""
    F.layer_norm(model(x()) * 0 + 1, (4,), eps=0.0).sum().backward()  # born


@case("layer_norm", "overflow: it adds up squares")
def layer_norm_of_large_values(model):
    """a LayerNorm of values whose squares overflow"""
    F.layer_norm(model(x()) * 1e25, (4,)).square().sum().backward()  # born


@case("group_norm", "overflow: it adds up squares")
def group_norm_of_large_values(model):
    """a GroupNorm of values whose squares overflow, under autocast"""
    with torch.autocast("cpu", torch.bfloat16):
        F.group_norm(model(x()) * 1e25, 2).square().sum().backward()  # born


@case("batch_norm", "running variance of 0 or below", lambda: never_trained())
def batch_norm_without_eps(model):
    """a BatchNorm in eval mode, with a running variance below zero"""
    model(x()).sum().backward()  # born


@case("std", "the std of one value")
def std_of_one(model):
    """the standard deviation of a batch of one"""
    model(x(1)).std(0).sum().backward()  # born


@case("mean", "the mean of no values")
def mean_of_nothing(model):
    """the mean loss of the samples of a class that is not in the batch"""
    model(x())[torch.zeros(3, dtype=torch.bool)].mean().backward()  # born


@case("nll_loss", "all 3 are ignored")
def every_target_ignored(model):
    """cross entropy where every target is padding"""
    F.cross_entropy(model(x()), torch.full((3,), -100)).backward()  # born


@case("acos", "acos of a number that is not between -1 and 1")
def acos_of_more_than_one(model):
    """an angle from a cosine that is rounded above 1"""
    cosine = model(x()) * 0 + 1.0000001
    torch.acos(cosine).sum().backward()  # born


@case("atanh", "atanh of a number that is not between -1 and 1")
def atanh_of_one(model):
    """a squashed action at the edge"""
    torch.atanh(torch.tanh(model(x()) * 1e3)).sum().backward()  # born


@case("logit", "logit of a number that is not between 0 and 1")
def logit_of_one(model):
    """the logit of a sigmoid that is 1"""
    torch.logit(torch.sigmoid(model(x()).abs() * 1e4)).sum().backward()  # born


@case("log", "log of 0", inside(lambda value: (value * 0).log_()))  # born
def log_in_place(model):
    """log_() in place: what was there before is looked at"""
    model(x()).sum().backward()


def checkpointed_exp(value):
    return checkpoint(large_exp, value, use_reentrant=False)


def large_exp(value):
    return torch.exp(value * 0 + 200)  # born


@case("exp", "exp of 200", inside(checkpointed_exp))
def in_a_checkpoint(model):
    """exp overflows in a checkpointed part"""
    model(x()).sum().backward()


@case("log", "log of 0", lambda: Called())
def inside_a_helper(model):
    """in a function that the forward calls"""
    model(x()).sum().backward()


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, value):
        return entropy(self.inner(value) * 1e4)


def entropy(scores):
    p = scores.softmax(-1)
    logs = p.log()  # born
    return -(p * logs).sum(-1)


@case("log", "log of 0")
def own_loss(model):
    """a cross entropy that is written out, behind the model"""
    model_output = model(x()) * 1e4
    loss = negative_log_likelihood(model_output.softmax(-1), torch.tensor([0, 0, 0]))
    loss.backward()


def negative_log_likelihood(probabilities, targets):
    return -probabilities.gather(1, targets[:, None]).log().mean()  # born


@case("log", "log of 0")
def divergence(model):
    """a Kullback-Leibler divergence from a distribution with a zero"""
    p, q = model(x()).softmax(-1), (model(x()) * 1e4).softmax(-1)
    (p * (p.log() - q.log())).sum().backward()  # born


# What comes in.


@case("input 0", "it was there before")
def bad_batch(model):
    """a NaN in the batch"""
    model(WITH_NAN).sum().backward()  # born


@case("input 0", "it was there before")
def infinite_batch(model):
    """an infinite feature"""
    model(WITH_INF).sum().backward()  # born


@case("parameter weight", "it was there before", lambda: spoilt(head()))
def bad_parameter(model):
    """a weight that is NaN already"""
    model(x()).sum().backward()  # born


# In the backward.


@case("sqrt", "division by zero")
def sqrt_at_zero(model):
    """the gradient of a square root at 0"""
    (model(x()) * 0).sqrt().sum().backward()  # graph


@case("sqrt", "division by zero")
def distance_of_a_point_to_itself(model):
    """a distance with sqrt, of two equal samples"""
    a = model(x())
    (a - a.clone()).pow(2).sum(-1).sqrt().sum().backward()  # graph


@case("sqrt", "0 / 0")
def where_does_not_help(model):
    """torch.where hides the square root of 0, but not its gradient"""
    value = model(x()) * 0
    torch.where(value > 0, value.sqrt(), value).sum().backward()  # graph


@case("pow", "0 to a negative power")
def fractional_power_at_zero(model):
    """the gradient of x ** 0.5 at 0"""
    ((model(x()) * 0) ** 0.5).sum().backward()  # graph


@case("log", "0 / 0")
def where_of_a_log(model):
    """torch.where hides the log of 0 but not its gradient"""
    value = model(x()) * 0
    torch.where(value > 0, value.log(), value).sum().backward()  # graph


@case("acos", "rsqrt of 0")
def acos_at_one(model):
    """the gradient of an angle between equal vectors"""
    cosine = model(x()) * 0 + 1
    torch.acos(cosine).sum().backward()  # graph


@case("asin", "rsqrt of 0")
def asin_at_one(model):
    """the gradient of asin at 1"""
    cosine = model(x()) * 0 + 1
    torch.asin(cosine).sum().backward()  # graph


@case("mul", "more than float16 can hold")
def float16_gradient(model):
    """a gradient in float16 that is scaled too far"""
    value = model(x()).half()
    (value * 1000.0).float().sum().mul(1000.0).backward()  # graph


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        (value,) = ctx.saved_tensors
        return grad / (value - value)  # born


@case("div", "division by zero")
def own_function(model):
    """the backward of an autograd Function"""
    Bad.apply(model(x())).sum().backward()


def checkpointed_root(value):
    return checkpoint(root_of_zero, value, use_reentrant=False)


def root_of_zero(value):
    return (value * 0).sqrt()  # graph


@case("sqrt", "division by zero", inside(checkpointed_root))
def backward_of_a_checkpoint(model):
    """a gradient at 0, in a part that is run again in the backward"""
    model(x()).sum().backward()


@case("sqrt", "division by zero")
def gradient_penalty(model):
    """a gradient penalty whose gradient has a norm of 0"""
    inputs = x().requires_grad_()
    (grad,) = torch.autograd.grad((model(inputs) * 0).sum(), inputs, create_graph=True)
    (grad.pow(2).sum(-1).sqrt() - 1).pow(2).mean().backward()  # graph


# What is legitimate.


@clean()
def masked_scores(model):
    """-inf for what a mask hides, before a softmax"""
    model(x()).masked_fill(x() > 0.9, -INF).softmax(-1).square().sum().backward()


@clean()
def additive_mask(model):
    """a causal mask that is added"""
    mask = torch.triu(torch.full((4, 4), -INF), 1)
    scores = model(x(4)) + mask
    scores.softmax(-1).square().sum().backward()


@clean()
def attention_with_a_mask(model):
    """scaled_dot_product_attention with a boolean mask"""
    q = model(x()).view(1, 1, 3, 4)
    F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 3).tril().bool()).sum().backward()


@clean(lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))
def padded_transformer(model):
    """a Transformer layer with padding"""
    padding = torch.tensor([[False, False, True], [False, False, False]])
    model(x(6).view(2, 3, 4), src_key_padding_mask=padding).sum().backward()


@clean()
def impossible_class(model):
    """logits of -inf for classes that are no target"""
    scores = model(x()).masked_fill(torch.tensor([False, False, False, True]), -INF)
    F.cross_entropy(scores, torch.tensor([0, 1, 2])).backward()


@clean()
def sum_of_exponentials(model):
    """logsumexp over scores with -inf in them"""
    model(x()).masked_fill(x() > 0.9, -INF).logsumexp(-1).sum().backward()


@clean()
def running_maximum(model):
    """a maximum that begins at -inf"""
    best = torch.full((3,), -INF)
    for column in model(x()).unbind(1):
        best = torch.maximum(best, column)
    best.sum().backward()


@clean()
def pooled(model):
    """max pooling, which pads with -inf"""
    F.max_pool1d(model(x())[None], 3, padding=1).sum().backward()


@clean()
def hidden_in_time(model):
    """a NaN that torch.where takes out, with no gradient through it"""
    value = model(x())
    safe = torch.where(x() > 0, x(), torch.ones(()))
    torch.where(x() > 0, value * safe.log(), value).sum().backward()


@clean()
def nothing_special(model):
    """an ordinary step"""
    F.mse_loss(model(x()), x()).backward()


@clean()
def only_looked_at(model):
    """a statistic for the log that is NaN, and not a part of the loss"""
    value = model(x())
    ratio = (value * 0 / (value * 0)).detach().mean()
    loss = value.square().mean()
    loss.backward()
    return ratio
