import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from tenterhook import AddressError, capture, sites
from tenterhook.addresses.modules import walk
from tenterhook.addresses.sites import resolve


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3)
        self.block = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4))
        self.again = self.block
        self.loose = [nn.Linear(4, 4), {"deep": nn.Linear(4, 2)}]

    def forward(self, x):
        return self.loose[1]["deep"](self.loose[0](self.block(x)))


def names(found):
    return [str(site) for site in found]


def test_every_name_of_every_module():
    assert [name for name, _ in walk(Net())] == [
        ".", "conv1", "block", "block.0", "block.1", "again", "again.0", "again.1", "loose.0", "loose.1.deep",
    ]  # fmt: skip


def test_the_table_prints_names_classes_parameters_and_shapes():
    table = sites(Net())
    assert str(table).splitlines()[:4] == [
        "address       class        parameters  shapes",
        "────────────  ───────────  ──────────  ──────────────────────────",
        ".             Net                  28",
        "conv1         Conv2d               20  weight 2×1×3×3, bias 2",
    ]
    assert "again.1       BatchNorm1d           8  the same module as block.1" in str(table)
    assert str(table[1]) == "conv1"
    assert table[1].class_name == "Conv2d"
    assert table[1].shapes == {"weight": (2, 1, 3, 3), "bias": (2,)}
    assert len(table) == 10
    assert "<td" in table._repr_html_()


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("conv1", ["conv1"]),
        (".", ["."]),
        ("**<ReLU>", ["block.0"]),
        ("**<Module>", [".", "conv1", "block", "block.0", "block.1", "loose.0", "loose.1.deep"]),
        ("block.*", ["block.0", "block.1"]),
        ("grad(*.0:in[0]@1)", ["grad(block.0:in[0]@1)", "grad(loose.0:in[0]@1)"]),
        ("**.weight", ["conv1.weight", "block.1.weight", "loose.0.weight", "loose.1.deep.weight"]),
        ("**.running_mean", ["block.1.running_mean"]),
        ("conv1.bias", ["conv1.bias"]),
        ("block.1.running_var", ["block.1.running_var"]),
        ("again.1", ["again.1"]),
        ("loose.1.deep", ["loose.1.deep"]),
        (nn.Linear, ["loose.0", "loose.1.deep"]),
        (lambda name, module: name.endswith("1"), ["conv1", "block.1"]),
    ],
)
def test_selectors(selector, expected):
    assert names(resolve(Net(), selector)) == expected


def test_module_objects_registered_or_not():
    net = Net()
    assert names(resolve(net, net.block)) == ["block"]
    assert names(resolve(net, net.loose[0])) == ["loose.0"]
    outside = nn.Linear(1, 1)
    assert names(resolve(net, outside))[0].startswith("Linear at 0x")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: nn.DataParallel(net),
        lambda net: AveragedModel(net),
        lambda net: torch.compile(net, backend="eager"),
        lambda net: checkpoint_wrapper(net),
        lambda net: nn.DataParallel(torch.compile(checkpoint_wrapper(net), backend="eager")),
    ],
)
def test_wrapper_parts_never_show_and_are_accepted(wrap):
    net = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))), nn.ReLU())
    wrapped = wrap(net)
    assert names(sites(wrapped)) == [".", "0", "0.0", "1"]
    (written,) = [name for name, module in wrapped.named_modules() if isinstance(module, nn.Linear)]
    assert written != "0.0"
    assert names(resolve(wrapped, written)) == ["0.0"]
    parameter = next(name for name, _ in wrapped.named_parameters() if name.endswith("weight"))
    assert names(resolve(wrapped, parameter)) == names(resolve(wrapped, "0.0.weight")) == ["0.0.weight"]


def test_a_module_called_module_is_no_wrapper():
    net = nn.Module()
    net.module = nn.Sequential(nn.ReLU())
    assert names(sites(net)) == [".", "module", "module.0"]
    assert names(resolve(net, "module.0")) == ["module.0"]


def test_names_with_reserved_characters():
    net = nn.ModuleDict(
        {"a:b": nn.ReLU(), "x/y[0]": nn.ReLU(), "<user>": nn.ReLU(), "*": nn.ReLU(), "grad(q)": nn.ReLU()}
    )
    for site in sites(net):
        assert names(resolve(net, str(site))) == [str(site)]
    assert names(resolve(net, "x/y[0]")) == [r"x\/y\[0\]"]
    assert names(resolve(net, "a:b")) == [r"a\:b"]


def test_a_child_that_holds_its_parent_does_not_loop():
    net = nn.Sequential(nn.ReLU())
    net[0].parent = net
    assert [name for name, _ in walk(net)] == [".", "0"]


@pytest.mark.parametrize(
    ("selector", "parts"),
    [
        ("conv2", ["'conv2'", "did you mean conv1", "tenterhook sites FILE.py:factory"]),
        ("block.conv1", ["did you mean conv1"]),
        ("conv1.wieght", ["did you mean conv1.weight"]),
        ("**<Conv3d>", ["its classes are BatchNorm1d, Conv2d", "did you mean **<Conv2d>"]),
        ("zzz.*", ["nothing in Net answers to 'zzz.*'"]),
        ("conv1.weight:in", ["conv1.weight is a parameter", "inputs, leaves and calls belong to modules"]),
        ("conv1.weight[0]", ["conv1.weight is a parameter"]),
        ("bloc/y", ["did you mean block"]),
    ],
)
def test_an_unknown_address_says_what_is_near(selector, parts):
    with pytest.raises(AddressError) as error:
        capture(Net(), selector)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_selectors_that_match_nothing():
    with pytest.raises(AddressError, match="no module of class LSTM in Net; its classes are BatchNorm1d"):
        capture(Net(), nn.LSTM)
    with pytest.raises(AddressError, match="no module for which the predicate is true"):
        capture(Net(), lambda name, module: False)


@pytest.mark.parametrize(
    ("model", "selector", "hint"),
    [
        ("conv1", Net(), "put the model first"),
        (Net, "conv1", "pass an instance, Net"),
        (3, "conv1", "got int"),
        (Net(), 3, "a selector is an address"),
        (Net(), int, "a kind of torch.nn.Module"),
    ],
)
def test_wrong_types(model, selector, hint):
    with pytest.raises(TypeError, match=hint):
        capture(model, selector)


def test_tied_parameters_name_each_other():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    net[1].weight = net[0].weight
    table = str(sites(net, match="**.weight"))
    assert table.splitlines()[2:] == ["0.weight  Parameter          20  5×4, tied to 1.weight"]


def test_lazy_modules_have_no_shapes_yet():
    assert "weight ?" in str(sites(nn.Sequential(nn.LazyLinear(3))))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_parameters_of_lazy_and_scripted_modules():
    assert "0.weight  Parameter           0  ?" in str(sites(nn.Sequential(nn.LazyLinear(3)), match="**.weight"))
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 3)))
    assert "0.weight  Parameter           6  3×2" in str(sites(scripted, match="**.weight"))
    with capture(scripted, "grad(0.weight)") as seen:
        scripted(torch.ones(1, 2)).sum().backward()
    assert seen["grad(0.weight)"].shape == (3, 2)


def test_what_one_run_saw_at_a_site_is_not_told_of_another():
    model = nn.Sequential(nn.ReLU())
    assert [site.seen for size in (2, 3) for site in sites(model, torch.ones(size), match="0")] == [
        "2 float32",
        "3 float32",
    ]
    assert resolve(model, "0")[0].seen == ""


def test_which_sites_are_whole_outputs():
    model = Net()
    texts = ["conv1", "conv1:out", "conv1@0", "conv1:out[0]", "conv1:in", "grad(conv1)", "conv1.weight"]
    assert [resolve(model, text)[0].is_whole_output for text in texts] == [True, True, *[False] * 5]
    gradient = resolve(model, "conv1")[0].gradient()
    assert gradient.address.is_whole and not gradient.is_whole_output and gradient.value().is_whole_output
