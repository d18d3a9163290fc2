import pytest
import torch

from tenterhook.platform.untraced import never_trace


def test_a_function_is_called_at_every_run_of_compiled_code():
    seen = []

    def tell(value):
        seen.append(type(value))
        return value

    never_trace(tell, "a reason")
    compiled = torch.compile(lambda x: tell(x * 2) + 1, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
    torch._dynamo.reset()
    assert seen == [torch.Tensor] * 3, "Dynamo traces functions with _torchdynamo_disable now"
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a reason"):
        torch.compile(lambda x: tell(x * 2) + 1, backend="eager", fullgraph=True)(torch.ones(2))
    torch._dynamo.reset()
