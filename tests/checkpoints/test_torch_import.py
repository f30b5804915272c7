"""The shorter import of torch. Each test needs a process where torch is not imported yet."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREPARE = """
import sys
from batchline.checkpoints.torch_import import _PutOff, import_shape_functions, prepare_torch, with_shapes
prepare_torch()
import torch
def is_put_off():
    return isinstance(sys.modules["torch._meta_registrations"], _PutOff)
"""


def output_of(code: str) -> list[str]:
    """The lines that code prints after `PREPARE`."""
    command = [sys.executable, "-c", PREPARE + code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def test_common_models_are_created_without_the_functions_for_shapes() -> None:
    code = """
from batchline.checkpoints.model_code import created, import_model_code
import_model_code()
from transformers import LlamaConfig, LlamaForCausalLM
def make():
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1))
model = created(make, trust_remote_code=False)
print(is_put_off(), "sympy" in sys.modules, model.lm_head.weight.shape, model.model.rotary_emb.inv_freq.shape)
"""
    assert output_of(code) == ["True False torch.Size([32000, 4096]) torch.Size([64])"]


def test_models_that_need_the_functions_get_them() -> None:
    """Llama 3 computes its rotary embedding with `torch.where`, which has no other function for shapes."""
    code = """
from batchline.checkpoints.model_code import created, import_model_code
import_model_code()
from transformers import LlamaConfig, LlamaForCausalLM
rope = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
rope["original_max_position_embeddings"] = 8192
def make():
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, rope_parameters=rope))
model = created(make, trust_remote_code=False)
print(is_put_off(), model.model.rotary_emb.inv_freq.shape)
"""
    assert output_of(code) == ["False torch.Size([64])"]


def test_a_load_whose_random_numbers_need_them_is_repeated_with_them() -> None:
    """Bug: embedding models did not run with `--quantization int8`. torch's generators need a part of the functions."""
    code = """
def make():
    try:
        return torch.Generator().manual_seed(0)
    except RuntimeError as exc:
        raise LookupError("the model does not run") from exc
print(with_shapes(make).initial_seed(), is_put_off())
"""
    assert output_of(code) == ["0 False"]


def test_a_load_without_memory_is_not_repeated() -> None:
    code = """
def make():
    print("made")
    raise torch.OutOfMemoryError("CUDA out of memory")
try:
    with_shapes(make)
except RuntimeError:
    print(is_put_off())
"""
    assert output_of(code) == ["made", "True"]


def test_an_error_without_them_is_not_hidden() -> None:
    code = """
def make():
    print("made")
    raise NotImplementedError("never")
for _ in range(2):
    try:
        with_shapes(make)
    except NotImplementedError as exc:
        print(exc, is_put_off())
"""
    assert output_of(code) == ["made", "made", "never False", "made", "never False"]


@pytest.mark.parametrize(
    "use",
    [
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))",
        "torch._meta_registrations.aten",
        "from torch._meta_registrations import register_meta",
        "import torch._dynamo",
        "from batchline.checkpoints.model_code import created; created(lambda: 1, trust_remote_code=True)",
    ],
)
def test_whoever_uses_them_gets_them(use: str) -> None:
    code = f"""
print(is_put_off())
{use}
print(is_put_off(), torch.eye(3, device="meta").shape, torch.where(torch.ones(2, device="meta") > 0, 1, 2).shape)
"""
    assert output_of(code) == ["True", "False torch.Size([3, 3]) torch.Size([2])"]


def test_a_process_that_has_imported_torch_is_left_alone() -> None:
    code = """
before = list(sys.meta_path)
import_shape_functions()
prepare_torch()
print(sys.meta_path == before, is_put_off(), import_shape_functions())
"""
    assert output_of(code) == ["True False False"]
