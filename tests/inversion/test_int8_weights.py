"""Models whose weights another library quantised are read with themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

READ = """
import json, sys
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM
import preimage

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
)
module = LlamaForCausalLM(config)
plain = preimage.load(module).identity.weight_hash
quantize_(module, Int8WeightOnlyConfig())
model = preimage.load(module)
prompts = torch.randint(300, (3, 12), generator=torch.Generator().manual_seed(1))
found = []
for layer in (1, 3, "final"):
    states = model.states(prompts, (layer,))[layer]
    found += [[one.status, list(one.token_ids)] for one in preimage.invert(model, states, layer)]
first = model.identity.weight_hash
module.model.layers[0].mlp.up_proj.weight.scale.mul_(1.01)
hashes = [plain, first, preimage.load(module).identity.weight_hash]
print(json.dumps({"found": found, "prompts": prompts.tolist(), "hashes": hashes,
                  "head": list(model.unembedding.shape)}))
"""


def test_a_model_with_int8_weights_reads_its_own_states() -> None:
    home = Path(sys.prefix) / "quant"  # apart from the rest: see the Makefile
    assert (home / "torchao").is_dir(), "torchao is not there; run `make setup`"
    path = os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-c", READ], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["found"] == [["recovered", ids] for _ in range(3) for ids in said["prompts"]]
    assert len(set(said["hashes"])) == 3  # codes and scales are part of the identity
    assert said["head"] == [300, 64]
