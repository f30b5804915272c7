"""Model code is imported without torch's compiler. Each test needs a process where nothing is imported yet."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORTS = "import sys, torch; from batchline.checkpoints.model_code import import_model_code; import_model_code()\n"
HEAVY = ["torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "sympy"]


def output_of(code: str) -> str:
    command = [sys.executable, "-c", IMPORTS + code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_no_compiler_and_no_optimizers_are_imported() -> None:
    models = "from transformers.models.llama.modeling_llama import LlamaForCausalLM; "
    models += "from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM; "
    assert output_of(f"{models} print([name for name in {HEAVY} if name in sys.modules])") == "[]"


def test_the_compiler_works_afterwards() -> None:
    code = (
        "compiled = torch.compile(lambda x: x * 2 + 1, backend='eager'); "
        "from transformers.masking_utils import TransformGetItemToIndex as used; "
        "from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex; "
        "print(compiled(torch.ones(2)).tolist(), used is TransformGetItemToIndex, torch._dynamo.disable.__module__)"
    )
    assert output_of(code) == "[3.0, 3.0] True torch._dynamo.decorators"


def test_code_that_needs_the_compiler_gets_it_even_then() -> None:
    code = (
        "from batchline.checkpoints.model_code import without_compiler\n"
        "with without_compiler():\n"
        "    early = torch._dynamo\n"
        "    torch.nn.Embedding(2, 2, device='meta')\n"
        "    print('torch._dynamo.config' in sys.modules)\n"
        "    print(torch._dynamo.config is early.config, torch._dynamo is early)\n"
        "print(torch._dynamo.config is sys.modules['torch._dynamo'].config)"
    )
    assert output_of(code).splitlines() == ["False", "True False", "True"]


@pytest.mark.parametrize("library", ["scipy", "torch_distributed"])
def test_what_is_imported_later_finds_the_libraries(library: str) -> None:
    check = f"is_{library}_available"
    imports = "import transformers.utils as utils; from transformers.utils import import_utils; "
    assert output_of(f"{imports} print(utils.{check} is import_utils.{check}, utils.{check}())") == "True True"
