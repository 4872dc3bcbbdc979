"""States that no prompt made: of another layer, and moved at one position. Prints one json document."""

import json

import torch

import preimage

TEXT = "The committee will meet again on Thursday to discuss the budget for the coming year."

model = preimage.load("smollm2", device="cpu")
states = preimage.capture(model, [TEXT], layers=[14, 15, 16])
moved = states.at(0, 15).clone()
direction = torch.randn(model.d_model, generator=torch.Generator().manual_seed(0))
moved[6] += 0.8 * moved[6].norm() * direction / direction.norm()
given = {"layer 14 as 15": states.at(0, 14), "layer 16 as 15": states.at(0, 16), "position 6 moved": moved}
rows = {}
for name, tensor in given.items():
    (found,) = preimage.invert(model, tensor[None], 15)
    kept = ("status", "failed_position", "failed_distance", "tests", "seconds", "text", "reason")
    rows[name] = {field: getattr(found, field) for field in kept}
print(json.dumps({"tokens": states.lengths[0], "cases": rows}, indent=1))  # noqa: T201  # a script
